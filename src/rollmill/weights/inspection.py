"""What a model directory holds, read from its files alone: no torch, no transformers.

Decides whether a directory can be trained as it is, and says what is missing. Used by `--dry-run` and `model list`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from rollmill.errors import ModelError, WeightError
from rollmill.weights.tensorfile import DTYPE_NAMES, read_header

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_REWARD_HEAD = "ForSequenceClassification"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a model that memory and time are planned with.

    Attributes:
        architecture: class name in `config.json`.
        dtype: dtype of most stored weights.
        parameters: stored numbers; a tied head counts once.
        vocabulary_size: rows of the embedding.
        max_positions: longest sequence the model was made for.
        tied: head and embedding are one tensor.
    """

    architecture: str
    model_type: str
    dtype: str
    parameters: int
    weight_bytes: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocabulary_size: int
    max_positions: int
    tied: bool

    @property
    def has_reward_head(self) -> bool:
        """Whether it gives scores for a sequence instead of the next token's distribution."""
        return self.architecture.endswith(_REWARD_HEAD)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return bytes of keys and values that one token keeps.

        Example:
            SmolLM2-135M: 2 * 30 layers * 3 kv heads * 64 = 11,520 numbers, 46,080 bytes in float32.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def inspect(path: str | Path) -> ModelFacts:
    """Return the facts of a Hugging Face directory.

    Raises:
        ModelError: if `config.json` or the safetensors are missing or cannot be read.
    """
    path = Path(path)
    config = read_config(path)
    shapes = _stored_tensors(path)
    parameters = sum(math.prod(shape) for _, shape in shapes.values())
    widths: dict[str, int] = {}
    for dtype, shape in shapes.values():
        widths[dtype] = widths.get(dtype, 0) + math.prod(shape)
    heads = _number(config, "num_attention_heads", path=path)
    hidden = _number(config, "hidden_size", path=path)
    return ModelFacts(
        architecture=(config.get("architectures") or ["unknown"])[0],
        model_type=str(config.get("model_type", "unknown")),
        dtype=max(widths, key=lambda name: widths[name]),
        parameters=parameters,
        weight_bytes=sum(file.stat().st_size for file in weight_files(path)),
        layers=_number(config, "num_hidden_layers", path=path),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        hidden_size=hidden,
        intermediate_size=int(config.get("intermediate_size") or 4 * hidden),
        vocabulary_size=_embedding_rows(shapes, config, path=path),
        max_positions=_number(config, "max_position_embeddings", path=path),
        tied=bool(config.get("tie_word_embeddings", True)) and "lm_head.weight" not in shapes,
    )


def check_directory(path: str | Path, *, serving: bool = False) -> ModelFacts:
    """Check that a directory can be trained as it is, and return its facts.

    Args:
        path: the directory.
        serving: whether it is served alone, and not trained: then it may have a reward head.

    Raises:
        ModelError: naming what is missing or does not fit, and what to do.
    """
    path = Path(path)
    facts = inspect(path)
    config = read_config(path)
    _check_architecture(facts, config, path=path, serving=serving)
    if not any((path / name).exists() for name in _TOKENIZERS):
        raise ModelError(
            f"{path} has no tokenizer ({', '.join(_TOKENIZERS[:2])}). Copy the tokenizer files of the same model "
            "there, for example with AutoTokenizer.save_pretrained."
        )
    if not has_chat_template(path):
        raise ModelError(
            f"the tokenizer in {path} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json), so messages cannot be turned into tokens. Use an instruction-tuned model, or add "
            "a template."
        )
    largest = largest_token_id(path)
    if largest is not None and largest >= facts.vocabulary_size:
        raise ModelError(
            f"the tokenizer in {path} has token ids up to {largest}, but the model embeds {facts.vocabulary_size} "
            "tokens (ids 0 to "
            f"{facts.vocabulary_size - 1}). It is the tokenizer of another model: copy the right one, or resize the "
            "embedding."
        )
    return facts


def read_config(path: Path) -> dict[str, Any]:
    """Return `config.json`.

    Raises:
        ModelError: if it is missing or not JSON.
    """
    file = path / "config.json"
    if not file.exists():
        raise ModelError(
            f"{path} is not a model directory: it has no config.json. Name a Hugging Face directory with config.json, "
            "*.safetensors and tokenizer files, or a model of `rollmill model list`."
        )
    return _read_json(file)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model, in order.

    Raises:
        ModelError: if there are none, or the index names one that is missing.
    """
    index = path / _INDEX
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise ModelError(
                f"{path} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}. The download did not "
                "finish: fetch it again."
            )
        return [path / name for name in names]
    single = path / "model.safetensors"
    if not single.exists():
        others = [file.name for file in path.glob("*.bin")]
        hint = f" It has {others[0]}: convert it with save_pretrained(safe_serialization=True)." if others else ""
        raise ModelError(
            f"{path} has no model.safetensors (and no {_INDEX}).{hint} Rollmill reads safetensors only, since other "
            "formats can run code when they are loaded."
        )
    return [single]


def has_chat_template(path: Path) -> bool:
    """Return whether the tokenizer in a directory has a chat template."""
    if (path / "chat_template.jinja").exists() or (path / "chat_template.json").exists():
        return True
    config = path / "tokenizer_config.json"
    return config.exists() and bool(_read_json(config).get("chat_template"))


def largest_token_id(path: Path) -> int | None:
    """Return the largest id in `tokenizer.json`, or `None` where the tokenizer has another form."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = _read_json(file)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    ids += [token["id"] for token in tokenizer.get("added_tokens", ())]
    return max(ids, default=None)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}. Copy it again from the model's source.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no JSON object. Copy it again from the model's source.")
    return content


def _check_architecture(facts: ModelFacts, config: dict[str, Any], *, path: Path, serving: bool) -> None:
    reasons: list[str] = []
    if not facts.architecture.endswith(("ForCausalLM", _REWARD_HEAD) if serving else "ForCausalLM"):
        more = f", and has no reward head (...{_REWARD_HEAD})" if serving else ""
        reasons.append(f"architecture {facts.architecture} is not a causal language model (...ForCausalLM){more}")
    if config.get("is_encoder_decoder"):
        reasons.append("it has an encoder")
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        reasons.append(f"it has layers of kind {', '.join(kinds)}")
    if config.get("quantization_config"):
        reasons.append("its weights are quantised")
    if reasons:
        raise ModelError(
            f"the model in {path} is not supported: {'; '.join(reasons)}. Rollmill trains decoders with full "
            "attention in float32 or bfloat16 (Llama, Qwen2, Qwen3, SmolLM2 and alike). Choose one of those."
        )


def _stored_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in weight_files(path):
        try:
            header, _ = read_header(file)
        except WeightError as error:
            raise ModelError(f"{error} Copy the file again from the model's source.") from error
        for name, entry in header.items():
            found[name] = (DTYPE_NAMES.get(entry["dtype"], str(entry["dtype"])), tuple(entry["shape"]))
    if not found:
        raise ModelError(f"the safetensors in {path} hold no tensors. Copy the file again from the model's source.")
    return found


def _embedding_rows(shapes: dict[str, tuple[str, tuple[int, ...]]], config: dict[str, Any], *, path: Path) -> int:
    rows = [shape[0] for name, (_, shape) in shapes.items() if name.endswith(_EMBEDDINGS)]
    return rows[0] if len(rows) == 1 else _number(config, "vocab_size", path=path)


def _number(config: dict[str, Any], key: str, *, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ModelError(
            f"{path}/config.json has no number {key!r} (model_type {config.get('model_type')!r}). Rollmill trains "
            "decoder-only transformers with standard attention (Llama, Qwen2, Qwen3, SmolLM2 and alike)."
        )
    return value
