"""How an update treats the requests in flight. Pure: the setting and the time in, what to do and what to say out.

    keep       they stand still, and go on over the KV they have
    recompute  they stand still, and go on over KV made anew
    drain      they finish under the old weights, for a bounded time; what still runs then goes on as with `recompute`

Nobody loses a token in any of them. What is left after a drain is recomputed and not kept, because who asks for a drain
does not want keys and values of two versions in one answer; its version spans say where the new version begins.
"""

from __future__ import annotations

import msgspec

from rollmill.generator.engines.protocol import KvPolicy, UpdatePolicy


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests in flight before the weights changed.

    Attributes:
        seconds: they were waited for.
        cut: of them still ran then.
    """

    seconds: float = 0.0
    cut: int = 0


def kv_of(policy: UpdatePolicy) -> KvPolicy:
    """Return what becomes of the KV of requests that are still there when the weights change.

    Example:
        >>> kv_of("drain"), kv_of("keep")
        ('recompute', 'keep')
    """
    return "recompute" if policy == "drain" else policy


def patience_s(policy: UpdatePolicy, *, drain_on_update_s: float, left_s: float) -> float:
    """Return how long requests in flight are waited for.

    Args:
        policy: of the update.
        drain_on_update_s: the setting.
        left_s: of the load's deadline. Half of it is kept for the swap and its proof: a load that fails because it
            waited for others helps nobody.

    Example:
        >>> [patience_s("drain", drain_on_update_s=10.0, left_s=left_s) for left_s in (50.0, 4.0)]
        [10.0, 2.0]
        >>> patience_s("keep", drain_on_update_s=10.0, left_s=50.0)
        0.0
    """
    return max(0.0, min(drain_on_update_s, left_s / 2)) if policy == "drain" else 0.0


def cut_text(what: str, cut: int, *, waited_s: float, drain_on_update_s: float) -> str:
    """Return what to say of requests that did not finish in time.

    Args:
        what: was to be loaded.
        cut: requests that still ran.
        waited_s: for them.
        drain_on_update_s: the setting.
    """
    bound = "generator.drain_on_update_s"
    if waited_s < drain_on_update_s:
        bound = f"less than {bound} {drain_on_update_s:g}, because half of what is left of generator.load_deadline_s"
    return (
        f"{what}: {cut} requests in flight had not finished after {waited_s:.1f} s ({bound}); they go on under the new "
        "weights, over new KV. Raise generator.drain_on_update_s to let longer answers finish under one version"
    )
