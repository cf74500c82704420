"""The draft model of a replica: found, compared with the model that is served, loaded once.

It is not a policy: nobody publishes it, proves it on a canary or swaps it. A wrong draft costs time and no quality, so
all that must hold is that its token ids mean what those of the served model mean. Decides that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollmill.config.engines import published_rounding
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError, ModelError, WeightError
from rollmill.weights.inspection import weight_files
from rollmill.weights.prepare import prepare
from rollmill.weights.tensorfile import load_tensors

if TYPE_CHECKING:
    import torch

    from rollmill.generator.engines.embedded.drafting import DraftModel

_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")


def load_draft(
    path: str | Path, *, settings: GeneratorSettings, dtype: str, kernels: Literal["auto", "native", "torch"]
) -> DraftModel:
    """Return the draft model that the settings name, ready to guess for the model in a directory.

    Args:
        path: Hugging Face directory of the model that is served.
        settings: name the draft; it is served in the same precision.
        dtype: `float32` or `bfloat16`.
        kernels: of the engine.

    Raises:
        ConfigError: if no draft is named, or its tokens are others than the model's.
        ModelError: if it cannot be had, or not be served.
    """
    import torch

    from rollmill.generator.engines.embedded.drafting import DraftModel
    from rollmill.generator.engines.embedded.model import ServedModel

    if settings.draft_model is None:
        raise ConfigError(
            'generator.speculation is "draft" and generator.draft_model is not set: name a small model with the same '
            "tokens there"
        )
    source = Path(settings.draft_model)
    # A directory is taken as it is: what a policy needs beside weights and tokens, a chat template, a draft does not.
    where = source.resolve() if source.is_dir() else prepare(settings.draft_model).path
    check_same_tokens(Path(path), where)
    try:
        model = ServedModel(
            where,
            dtype=getattr(torch, dtype),
            tensors=_tensors_of(where),
            kernels=kernels,
            quantization=published_rounding(settings),
        )
    except WeightError as error:
        raise ModelError(
            f"the draft model in {where} cannot be read as it is stored: {error}. Save it again with the present "
            "transformers (AutoModelForCausalLM.from_pretrained and save_pretrained), or name another one"
        ) from error
    return DraftModel(model, tokens=settings.draft_tokens)


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        tensors.update(load_tensors(file))
    return tensors


def check_same_tokens(served: Path, draft: Path) -> None:
    """Refuse a draft whose token ids mean something else. How text is cut into tokens does not matter: both get ids.

    Directories without any tokenizer can be compared by the number of their tokens alone, which the engine does.

    Raises:
        ConfigError: with the first tokens that differ, or what is missing.
        ModelError: if a tokenizer is damaged.
    """
    ours, theirs = _tokens_of(served), _tokens_of(draft)
    if ours is None and theirs is None:
        return
    action = 'Name a draft of the same family in generator.draft_model, or set generator.speculation to "ngram"'
    if ours is None or theirs is None:
        lacking = served if ours is None else draft
        raise ConfigError(
            f"the draft model in {draft} cannot be compared with the model in {served}: {lacking} has no {_TOKENIZER}, "
            "so nobody knows whether their token ids mean the same. Save the tokenizer there "
            f"(AutoTokenizer.save_pretrained). {action}"
        )
    differing = sorted(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    if differing:
        first = differing[0]
        raise ConfigError(
            f"the draft model in {draft} has other tokens than the model in {served}: {len(differing)} of "
            f"{len(ours.keys() | theirs.keys())} ids differ, first id {first}, which is {ours.get(first)!r} in the "
            f"model and {theirs.get(first)!r} in the draft. {action}"
        )


def _tokens_of(path: Path) -> dict[int, str] | None:
    """Return id -> token, or `None` where a directory has no tokenizer.

    Raises:
        ConfigError: if it has one that cannot be compared.
        ModelError: if it is damaged.
    """
    file = path / _TOKENIZER
    if not file.exists():
        other = next((name for name in _OTHER_TOKENIZERS if (path / name).exists()), None)
        if other is not None:
            raise ConfigError(
                f"the tokens of the model in {path} cannot be compared with another model's: it has {other} and no "
                f"{_TOKENIZER}. Save its fast tokenizer there (AutoTokenizer.save_pretrained), or set "
                'generator.speculation to "ngram"'
            )
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {int(number): str(token) for token, number in vocabulary.items()}
        else:  # of a unigram model: token and score, in order
            tokens = {number: str(piece[0]) for number, piece in enumerate(vocabulary)}
        tokens |= {int(added["id"]): str(added["content"]) for added in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{file} cannot be read ({error!r}); copy it again from the model's source") from error
    return tokens
