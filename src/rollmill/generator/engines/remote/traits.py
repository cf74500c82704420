"""What a remote engine is, as its settings and its model say it. Decides nothing."""

from __future__ import annotations

import msgspec


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What a remote engine is, for its callers and for messages.

    Attributes:
        product: name of the server in sentences.
        kv_bytes_per_token: 0 if unknown.
        waits_for_siblings: whether members of a group wait for the first one's prefill.
        patience_s: longest wait for all requests to end when they were told to.
        hang_up_s: how long the server gets to end one request, before its connection is cut.
        max_loras: adapters that it serves at once beside its weights.
        max_lora_rank: greatest rank of one.
        how_to_keep: what to do instead, or to change, where an update cannot keep KV.
    """

    kind: str
    product: str
    model: str
    dtype: str
    vocabulary_size: int
    max_model_len: int
    max_num_seqs: int
    kv_bytes_per_token: int
    capabilities: tuple[str, ...]
    waits_for_siblings: bool
    patience_s: float
    hang_up_s: float = 5.0
    max_loras: int = 0
    max_lora_rank: int = 0
    how_to_keep: str = ""
