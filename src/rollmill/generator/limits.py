"""What a replica takes from its callers: whether a request is within the limits, and when to ask again. Pure.

Whether prompt and parameters fit the model is the engine's to say; the limits here are the operator's.
"""

from __future__ import annotations

from rollmill.config.serving import LimitSettings
from rollmill.errors import DataError, Overloaded
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.types import GenerateRequest, Turn

_OLD = 0.8
"""Weight of what was known, at each new duration: the last five turns say most."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


def check_limits(
    request: GenerateRequest, *, siblings: int, limits: LimitSettings, setting: str = "generator.limits.max_siblings"
) -> None:
    """Refuse a request that asks for more than one request may.

    Args:
        setting: that bounds the siblings.

    Raises:
        DataError: with the numbers, naming every limit that it is over.
    """
    tokens, asked = len(request.prompt_ids), request.sampling.max_new_tokens
    problems = [
        problem
        for problem in (
            _id_problem("request_id", request.request_id, limits=limits, required=True),
            _id_problem("session_id", request.session_id, limits=limits),
            _id_problem("group_key", request.group_key, limits=limits),
            _id_problem("job", request.job, limits=limits),
            _id_problem("adapter", request.adapter, limits=limits),
            None if siblings >= 1 else f"{siblings} samples were asked for; ask for 1 or more",
            _over("samples of one call", siblings, limit=limits.max_siblings, name=setting),
            _over("prompt tokens", tokens, limit=limits.max_prompt_tokens, name="generator.limits.max_prompt_tokens"),
            _over("new tokens", asked, limit=limits.max_new_tokens, name="generator.limits.max_new_tokens"),
        )
        if problem is not None
    ]
    if problems:
        name = request.request_id[: limits.max_request_id_chars]
        raise DataError(f"request {name} is refused: {'; '.join(problems)}")


def check_message(message: pb.GenerateRequest, *, limits: LimitSettings) -> None:
    """Refuse what a message asks of a router before anything is made of it: its samples, and how long its names are.

    Raises:
        DataError: with the numbers, naming every limit that it is over.
    """
    names = ("session_id", "group_key", "job", "adapter")
    found = (
        _id_problem("request_id", message.request_id, limits=limits, required=True),
        *(_id_problem(name, getattr(message, name), limits=limits) for name in names),
        _over("samples of one call", message.siblings or 1, limit=limits.max_siblings, name="router.max_siblings"),
    )
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise DataError(
            f"request {message.request_id[: limits.max_request_id_chars]} is refused: {'; '.join(problems)}"
        )


def _id_problem(what: str, value: str, *, limits: LimitSettings, required: bool = False) -> str | None:
    if required and not value:
        return f"it has no {what}; give one that no other living request has"
    return _over(
        f"characters in {what}",
        len(value),
        limit=limits.max_request_id_chars,
        name="generator.limits.max_request_id_chars",
    )


def _over(what: str, value: int, *, limit: int | None, name: str) -> str | None:
    if limit is None or value <= limit:
        return None
    return f"{value} {what}, and {name} is {limit}"


class Places:
    """Counts the samples that run or wait, and knows from the last ones how soon a place becomes free.

    Args:
        limits: of the replica.

    Example:
        >>> places = Places(LimitSettings(max_requests=4))
        >>> places.take(3, request_id="a")
        >>> places.taken
        3
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self._mean_s: float | None = None
        self.taken = 0

    def take(self, siblings: int, *, request_id: str) -> None:
        """Take places for the samples of a request.

        Raises:
            Overloaded: if there are fewer; says when to ask again.
            DataError: if there would be too few on an idle replica.
        """
        limit = self._limits.max_requests
        if siblings > limit:
            raise DataError(
                f"request {request_id} asks for {siblings} samples at once, and generator.limits.max_requests is "
                f"{limit}; ask for fewer, or raise it"
            )
        if self.taken + siblings > limit:
            wait_s = self.retry_after_s(siblings)
            raise Overloaded(
                f"request {request_id} refused: {self.taken} samples run or wait, {siblings} more were asked for, and "
                f"generator.limits.max_requests is {limit}. Ask again in {wait_s:.1f} s, or add a replica",
                retry_after_s=wait_s,
            )
        self.taken += siblings

    def give_back(self, siblings: int) -> None:
        """Give places back."""
        self.taken -= siblings

    def learn(self, turn: Turn) -> None:
        """Learn from a finished sample how long samples hold their place."""
        timings = turn.timings
        took_s = timings.queued_s + timings.prefill_s + timings.decode_s
        self._mean_s = took_s if self._mean_s is None else _OLD * self._mean_s + (1 - _OLD) * took_s

    def retry_after_s(self, siblings: int) -> float:
        """Return when this many places are likely to be free: samples end one by one, evenly over their duration.

        Example:
            >>> Places(LimitSettings()).retry_after_s(1)
            1.0
        """
        if self._mean_s is None or not self.taken:
            return 1.0
        missing = self.taken + siblings - self._limits.max_requests
        return min(max(self._mean_s * max(missing, 1) / self.taken, MIN_RETRY_S), MAX_RETRY_S)
