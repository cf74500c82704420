"""One request of a caller while it lives in the router, and the parts of it that run at replicas. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable

import msgspec

from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    ModelError,
    NotServing,
    Overloaded,
    RollmillError,
)
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.progress import ABORT, Progress, with_deadline
from rollmill.generator.router.records import Ask
from rollmill.generator.service import TextCodec
from rollmill.generator.wire import DEFAULT_DEADLINE_S

Emit = Callable[[pb.GenerateEvent, bytes | None], Awaitable[None]]
"""Takes the next event of a stream, and the bytes it came in if they can be passed on as they are."""
AT_THE_DEADLINE_S = 0.05
"""A sample that a replica ends this near to its deadline has ended because of it."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a call that runs at one replica: all its siblings, or one that goes on.

    Attributes:
        data: the serialized request.
        siblings: which siblings of the call, in the order in which the replica numbers them.
        bases: output tokens that each had before.
        fresh: whether it has not been sent anywhere yet.
    """

    ask: Ask
    data: bytes
    siblings: tuple[int, ...]
    bases: tuple[int, ...]
    fresh: bool


class Call:
    """One request of a caller, from its arrival to its answer.

    Attributes:
        names: ids under which replicas know it or parts of it.
        causes: what became of it at each replica that did not answer it.
        aborted: whether its caller asked to end it.
        gone: siblings that its caller asked to end alone.
    """

    __slots__ = (
        "_codec",
        "_progress",
        "aborted",
        "ask",
        "causes",
        "data",
        "deadline_at_s",
        "emit",
        "gone",
        "message",
        "names",
        "siblings",
        "started_s",
        "tries",
    )

    def __init__(
        self,
        message: pb.GenerateRequest,
        data: bytes,
        *,
        now_s: float,
        emit: Emit | None,
        codec: TextCodec | None,
        adapters: Collection[str] = (),
    ) -> None:
        self.message = message
        self.data = data
        self.emit = emit
        self.started_s = now_s
        self.deadline_at_s = now_s + (message.deadline_s or DEFAULT_DEADLINE_S)
        self.ask = ask_of(message, adapters=adapters)
        self.siblings = message.siblings or 1
        self._progress: Progress | None = None
        self._codec = codec
        self.names = {message.request_id}
        self.tries: Counter[int] = Counter()
        self.causes: list[tuple[str, str]] = []
        self.aborted = False
        self.gone: set[int] = set()

    @property
    def progress(self) -> Progress:
        """What it has got so far; made when it is first asked for, because most replies are passed on unread."""
        if self._progress is None:
            self._progress = Progress(self.message, codec=self._codec)
        return self._progress

    def whole(self) -> Piece:
        """Return the call as one piece."""
        siblings = self.siblings
        return Piece(
            ask=self.ask,
            data=self.data,
            siblings=tuple(range(siblings)),
            bases=(0,) * siblings,
            fresh=not self.tries,
        )

    def lost(self, siblings: Iterable[int], replica: str, why: str) -> None:
        """Note that a replica was lost for these siblings: each has its own attempts."""
        self.tries.update(siblings)
        self.causes.append((replica, why))

    def tries_of(self, siblings: Iterable[int]) -> int:
        """Return how often the one of these was lost that was lost most."""
        return max((self.tries[index] for index in siblings), default=0)

    def data_at(self, piece: Piece, *, now_s: float) -> bytes:
        """Return a piece's request with what is left of the deadline, if some of it has passed here."""
        left_s = max(self.deadline_at_s - now_s, AT_THE_DEADLINE_S)
        spent_s = now_s - self.started_s
        return piece.data if spent_s < AT_THE_DEADLINE_S and piece.fresh else with_deadline(piece.data, left_s)

    def is_cut(self, index: int, stop_reason: str, *, now_s: float) -> bool:
        """Return whether a sibling ended because of its replica (it drains), not of its caller or its deadline."""
        return (
            stop_reason == ABORT
            and not self.aborted
            and index not in self.gone
            and not self.ask.wave_id
            and now_s < self.deadline_at_s - AT_THE_DEADLINE_S
        )

    def end_open(self, *, all_of_them: bool) -> list[int]:
        """End siblings that are open with what they have, all or those that their caller ended; return which."""
        unfinished = [index for index in self.progress.open() if all_of_them or index in self.gone]
        for index in unfinished:
            self.progress.samples[index].stop_reason = ABORT
        return unfinished

    def story(self) -> str:
        """Return what became of it at each replica that did not answer it."""
        if not self.causes:
            return ""
        return "; it was tried at " + "; ".join(f"{replica}: {why}" for replica, why in self.causes)

    def final(self, error: RollmillError) -> RollmillError:
        """Return what the caller gets: the replica's own error, or the whole story if there is one."""
        if len(self.causes) == 1:
            return error
        text = f"request {self.message.request_id} failed{self.story()}"
        if isinstance(error, Overloaded):
            return Overloaded(text, retry_after_s=error.retry_after_s)
        kinds = (EngineDead, NotServing, DataError, ModelError, DeadlineExceeded)
        return next((kind for kind in kinds if isinstance(error, kind)), EngineError)(text)

    def cannot_move(self, error: RollmillError) -> RollmillError:
        """Return what a caller gets who has seen tokens of a request that cannot go on elsewhere."""
        tokens = sum(len(sample.output_ids) for sample in self.progress.samples)
        return EngineDead(
            f"request {self.message.request_id} was lost with its replica after {tokens} tokens were sent on: {error}. "
            "Its prompt was text, and the router has no tokenizer to go on with; send token ids, or start the router "
            "with --model"
        )


def ask_of(message: pb.GenerateRequest, *, adapters: Collection[str] = ()) -> Ask:
    """Return what the law has to know of a request.

    Args:
        adapters: names that a request may also give as its model.
    """
    return Ask(
        request_id=message.request_id,
        job=message.job,
        session_id=message.session_id,
        group_key=message.group_key,
        wave_id=message.wave.wave_id if message.HasField("wave") else "",
        min_policy_version=message.min_policy_version,
        siblings=message.siblings or 1,
        adapter=message.adapter or (message.model if message.model in adapters else ""),
    )
