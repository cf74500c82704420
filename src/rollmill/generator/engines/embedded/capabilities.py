"""What an embedded engine can do, by what it serves and how it was started. Pure."""

from __future__ import annotations

from rollmill.generator.engines.protocol import ADAPTERS, REWARD_SCORE

_ALWAYS = ("pause_abort", "pause_drain", "pause_keep", "prefix_cache", "stage")
_WITH_OUTPUT_HEAD = (
    "abort",
    "canary",
    "group_prefill",
    "kv_keep",
    "kv_recompute",
    "score",
    "speculation_draft",
    "speculation_ngram",
    "streaming",
    "top_k",
    "top_p",
    "version_spans",
    "waves",
)


def capabilities_of(*, labels: int, native_kernels: bool, host_kv: bool, adapters: bool) -> tuple[str, ...]:
    """Return the capabilities of an engine.

    Args:
        labels: scores of its reward head; 0 if it has an output head instead.
        native_kernels: whether compiled kernels multiply with the weights.
        host_kv: whether there is a second tier of KV.
        adapters: whether adapters are served beside the weights.

    Example:
        >>> capabilities_of(labels=1, native_kernels=False, host_kv=False, adapters=False)
        ('pause_abort', 'pause_drain', 'pause_keep', 'prefix_cache', 'stage', 'reward_score')
    """
    more = {"native_kernels": native_kernels, "host_kv": host_kv, ADAPTERS: adapters}
    served = (*_ALWAYS, REWARD_SCORE) if labels else tuple(sorted((*_ALWAYS, *_WITH_OUTPUT_HEAD)))
    return (*served, *(name for name, there in more.items() if there))
