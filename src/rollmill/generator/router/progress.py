"""What a request has got so far, from one replica or several, and how to go on from there. Pure.

A request that is moved goes on as a request for token ids: its prompt and what was sampled so far. With our engines its
stream of random numbers goes on too, so under equal weights it samples what it would have sampled where it was.
"""

from __future__ import annotations

import numpy as np

from rollmill.errors import LengthMismatch
from rollmill.generator.engines.streams import advanced_seed
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.service import TextCodec, sibling_seed
from rollmill.generator.wire import seed_of, sibling_id
from rollmill.types import StopReason

ABORT, LENGTH, STOP = StopReason.ABORT.value, StopReason.LENGTH.value, StopReason.STOP.value


class SampleProgress:
    """One sibling's output so far.

    Attributes:
        spans: [start, end, policy version] of its tokens.
        stop_reason: why it ended; empty while it goes on.
        cut: its replica ended it before its time.
        moves: times that it went on elsewhere.
    """

    __slots__ = (
        "behavior_logprobs", "cached_tokens", "cut", "moves", "output_ids", "pieces", "spans", "stop_reason", "text",
        "timings",
    )  # fmt: skip

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.behavior_logprobs: list[float] = []
        self.spans: list[list[int]] = []
        self.timings = [0.0, 0.0, 0.0]
        self.cached_tokens = 0
        self.pieces = 0
        self.cut = False
        self.moves = 0
        self.stop_reason = ""
        self.text: str | None = None

    def add_span(self, start: int, end: int, policy_version: int) -> None:
        """Note which weights sampled these tokens."""
        if end == start:
            return
        if self.spans and self.spans[-1][2] == policy_version:
            self.spans[-1][1] = end
        else:
            self.spans.append([start, end, policy_version])

    def add_end(self, timings: pb.Timings, cached_tokens: int, stop_reason: str) -> None:
        """Note how a piece ended."""
        for index, seconds in enumerate((timings.queued_s, timings.prefill_s, timings.decode_s)):
            self.timings[index] += seconds
        if not self.pieces:
            self.cached_tokens = cached_tokens
        self.pieces += 1
        self.stop_reason = stop_reason


class Progress:
    """All siblings of a request.

    Args:
        message: the request.
        codec: of the model's tokenizer; without it a prompt that was text or messages cannot go on elsewhere.
    """

    def __init__(self, message: pb.GenerateRequest, *, codec: TextCodec | None = None) -> None:
        self.message = message
        self.siblings = message.siblings or 1
        self.samples = [SampleProgress() for _ in range(self.siblings)]
        self.rendered = not message.prompt_ids
        self.prompt_ids: list[int] = list(message.prompt_ids)
        self._codec = codec

    # -- what comes in

    def take_chunk(self, index: int, chunk: pb.TokenChunk, *, base: int) -> None:
        """Take the next tokens of a sibling.

        Args:
            base: output tokens that it had before this piece.

        Raises:
            LengthMismatch: if tokens are missing or come twice, or their log-probs do not fit.
        """
        sample, new = self.samples[index], len(chunk.output_ids)
        have = len(sample.output_ids)
        if base + chunk.start_token != have:
            raise LengthMismatch(
                what=f"start of a chunk of {self.name(index)}", expected=have - base, got=chunk.start_token
            )
        if len(chunk.behavior_logprobs) != new:
            raise LengthMismatch(
                what=f"log-probs of {self.name(index)}", expected=new, got=len(chunk.behavior_logprobs)
            )
        sample.output_ids += chunk.output_ids
        sample.behavior_logprobs += chunk.behavior_logprobs
        sample.add_span(have, have + new, chunk.policy_version)

    def take_finished(self, index: int, finished: pb.Finished, *, base: int) -> None:
        """Take the end of a sibling's piece.

        Raises:
            LengthMismatch: if tokens are missing.
        """
        sample = self.samples[index]
        have = len(sample.output_ids) - base
        if have != finished.output_tokens:
            raise LengthMismatch(what=f"tokens of {self.name(index)}", expected=finished.output_tokens, got=have)
        sample.add_end(finished.timings, finished.cached_tokens, finished.stop_reason)
        sample.text = finished.text if finished.HasField("text") else None

    def take_reply(self, reply: pb.GenerateReply) -> None:
        """Take a reply in one piece.

        Raises:
            LengthMismatch: if samples are missing, or log-probs or spans do not fit the token ids.
        """
        if [one.index for one in reply.samples] != list(range(self.siblings)):
            raise LengthMismatch(what=f"samples of {self.name(0)}", expected=self.siblings, got=len(reply.samples))
        if reply.prompt_ids:
            self.prompt_ids = list(reply.prompt_ids)
        for sample, one in zip(self.samples, reply.samples, strict=True):
            covered = one.version_spans[-1].end_token if one.version_spans else 0
            if not len(one.behavior_logprobs) == len(one.output_ids) == covered:
                raise LengthMismatch(
                    what=f"log-probs and spans of {self.name(one.index)}", expected=len(one.output_ids), got=covered
                )
            sample.output_ids = list(one.output_ids)
            sample.behavior_logprobs = list(one.behavior_logprobs)
            sample.spans = [[s.start_token, s.end_token, s.policy_version] for s in one.version_spans]
            sample.add_end(one.timings, one.cached_tokens, one.stop_reason)
            sample.text = one.text if one.HasField("text") else None

    def forget(self) -> None:
        """Begin anew: nobody has seen what there is."""
        self.samples = [SampleProgress() for _ in self.samples]

    # -- what there is

    def name(self, index: int) -> str:
        """Return the id of a sibling."""
        return sibling_id(self.message.request_id, index, siblings=self.siblings)

    def count(self, index: int) -> int:
        """Return the output tokens of a sibling."""
        return len(self.samples[index].output_ids)

    def begun(self) -> bool:
        """Return whether there is any token."""
        return any(sample.output_ids for sample in self.samples)

    def open(self) -> list[int]:
        """Return the siblings that have not ended."""
        return [index for index, sample in enumerate(self.samples) if not sample.stop_reason]

    def reopen(self, index: int) -> None:
        """Let a sibling go on that its replica had cut short."""
        sample = self.samples[index]
        sample.stop_reason, sample.cut = "", True

    def can_move(self) -> bool:
        """Return whether siblings can go on elsewhere from the tokens they have."""
        return not self.rendered or (self._codec is not None and bool(self.prompt_ids))

    # -- how to go on

    def settle(self, index: int, *, max_model_len: int = 0) -> bool:
        """End a sibling whose last token was its last, though its replica did not live to say so; return whether."""
        sample, sampling = self.samples[index], self.message.sampling
        have = len(sample.output_ids)
        if not have or sample.stop_reason:
            return False
        if sample.output_ids[-1] in self._stop_token_ids():
            sample.stop_reason = STOP
        elif (sampling.HasField("max_new_tokens") and have >= sampling.max_new_tokens) or (
            max_model_len and len(self.prompt_ids) + have >= max_model_len
        ):
            sample.stop_reason = LENGTH
        return bool(sample.stop_reason)

    def move(self, index: int, *, deadline_s: float) -> pb.GenerateRequest:
        """Move a sibling: return the request that goes on with it."""
        asked, sample = self.message, self.samples[index]
        have = len(sample.output_ids)
        sample.moves += 1
        sample.cut = False
        message = pb.GenerateRequest()
        message.CopyFrom(asked)
        message.ClearField("text")
        message.ClearField("messages")
        message.request_id = self.name(index)
        message.siblings = 1
        del message.prompt_ids[:]
        message.prompt_ids.extend(self.prompt_ids)
        message.prompt_ids.extend(sample.output_ids)
        message.deadline_s = deadline_s
        if self.siblings > 1 and not asked.group_key:
            message.group_key = asked.request_id
        if asked.sampling.HasField("max_new_tokens"):
            message.sampling.max_new_tokens = asked.sampling.max_new_tokens - have
        if not asked.sampling.stop_token_ids:
            message.sampling.stop_token_ids.extend(self._stop_token_ids())
        seed = asked.sampling.seed if asked.sampling.HasField("seed") else seed_of(asked.request_id)
        message.sampling.seed = advanced_seed(sibling_seed(seed, index), have)
        return message

    def _stop_token_ids(self) -> tuple[int, ...]:
        given = tuple(self.message.sampling.stop_token_ids)
        if given or not self.rendered or self._codec is None:
            return given
        return tuple(self._codec.stop_token_ids)

    # -- what goes out

    def finished(self, index: int) -> pb.GenerateEvent:
        """Return the event of a sibling's end, over all its pieces."""
        sample = self.samples[index]
        return pb.GenerateEvent(
            request_id=self.message.request_id,
            index=index,
            finished=pb.Finished(
                output_tokens=len(sample.output_ids),
                stop_reason=sample.stop_reason,
                timings=_timings(sample),
                cached_tokens=sample.cached_tokens,
                text=self._text(sample),
            ),
        )

    def reply(self) -> pb.GenerateReply:
        """Return the reply in one piece."""
        return pb.GenerateReply(
            request_id=self.message.request_id,
            samples=[
                pb.Sample(
                    index=index,
                    output_ids=sample.output_ids,
                    behavior_logprobs=sample.behavior_logprobs,
                    version_spans=[
                        pb.VersionSpan(start_token=start, end_token=end, policy_version=version)
                        for start, end, version in sample.spans
                    ],
                    stop_reason=sample.stop_reason,
                    timings=_timings(sample),
                    cached_tokens=sample.cached_tokens,
                    text=self._text(sample),
                )
                for index, sample in enumerate(self.samples)
            ],
            prompt_ids=self.prompt_ids if self.rendered else None,
        )

    def _text(self, sample: SampleProgress) -> str | None:
        if not self.rendered:
            return None
        if sample.moves and self._codec is not None:
            return self._codec.decode(np.array(sample.output_ids, dtype=np.int64))
        return sample.text or ""


def _timings(sample: SampleProgress) -> pb.Timings:
    queued_s, prefill_s, decode_s = sample.timings
    return pb.Timings(queued_s=queued_s, prefill_s=prefill_s, decode_s=decode_s)


def with_deadline(data: bytes, deadline_s: float) -> bytes:
    """Return a serialized request with another deadline, unread: of a field that comes twice the last one counts.

    Example:
        >>> data = pb.GenerateRequest(request_id="a", deadline_s=9.0).SerializeToString()
        >>> asked = pb.GenerateRequest.FromString(with_deadline(data, 2.5))
        >>> asked.request_id, asked.deadline_s
        ('a', 2.5)
    """
    return data + pb.GenerateRequest(deadline_s=deadline_s).SerializeToString()
