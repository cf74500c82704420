"""A Llama small enough for tests, with a tokenizer whose ids are ASCII codes.

Decides nothing. Made from a fixed seed with NumPy, so that the weights are equal on every machine and with every torch.
Imports safetensors and tokenizers inside its functions; needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY_SIZE = 128
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
MAX_POSITIONS = 512

_PAD, _START, _END, _UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
_SPECIAL = {0: _PAD, 1: _START, 2: _END, 3: _UNKNOWN}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SEED = 20_240_917
_STD = 0.02


def make(directory: Path) -> None:
    """Write the model, its configuration and its tokenizer into a directory."""
    from safetensors.numpy import save_file

    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _config())
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    _save_tokenizer(directory / "tokenizer.json")


def weights() -> dict[str, np.ndarray]:
    """Return the parameters in float32: normal with standard deviation 0.02, norms 1; the head is tied."""
    generator = np.random.Generator(np.random.PCG64(_SEED))

    def normal(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape, dtype=np.float64) * _STD).astype(np.float32)

    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found = {"model.embed_tokens.weight": normal(VOCABULARY_SIZE, HIDDEN_SIZE)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.self_attn.q_proj.weight"] = normal(query, HIDDEN_SIZE)
        found[f"{at}.self_attn.k_proj.weight"] = normal(key_value, HIDDEN_SIZE)
        found[f"{at}.self_attn.v_proj.weight"] = normal(key_value, HIDDEN_SIZE)
        found[f"{at}.self_attn.o_proj.weight"] = normal(HIDDEN_SIZE, query)
        found[f"{at}.mlp.gate_proj.weight"] = normal(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        found[f"{at}.mlp.up_proj.weight"] = normal(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        found[f"{at}.mlp.down_proj.weight"] = normal(HIDDEN_SIZE, INTERMEDIATE_SIZE)
        found[f"{at}.input_layernorm.weight"] = np.ones(HIDDEN_SIZE, np.float32)
        found[f"{at}.post_attention_layernorm.weight"] = np.ones(HIDDEN_SIZE, np.float32)
    found["model.norm.weight"] = np.ones(HIDDEN_SIZE, np.float32)
    return found


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _START,
        "eos_token": _END,
        "pad_token": _PAD,
        "unk_token": _UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }


def _save_tokenizer(path: Path) -> None:
    """Write a tokenizer that makes one token of each character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    # No merges: every character stays a token of its own.
    vocabulary = {_token(code): code for code in range(VOCABULARY_SIZE)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL.values()])
    backend.save(str(path))


def _token(code: int) -> str:
    """Return the text of a token: printable characters and newlines as they are, the rest as names."""
    if code in _SPECIAL:
        return _SPECIAL[code]
    if 32 <= code < 127 or code in (9, 10, 13):
        return chr(code)
    return f"<0x{code:02X}>"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
