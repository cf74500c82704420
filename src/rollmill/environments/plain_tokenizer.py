"""A model's tokenizer and chat template without transformers, for directories that say nothing unusual.

Importing transformers takes longer than everything else the controller does before a run. What it does with such a
directory is little: `tokenizers` reads tokenizer.json, jinja2 renders the template in a sandbox. Decides for which
directories that holds: every key of tokenizer_config.json is one that is known to change nothing here, all special
tokens are in tokenizer.json, and the template uses none of what transformers adds to the language. Everything else is
left to transformers. A test compares both, id by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_CHANGE_NOTHING = (
    "backend",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "model_max_length",
    "tokenizer_class",
)
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_OTHER_SOURCES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates", "chat_template.json")
# Names and tags that transformers gives to templates, or gives another meaning; and fields that it adds to messages.
_ADDED_BY_TRANSFORMERS = re.compile(
    r"generation\s*-?%}|\b(tojson|strftime_now|namespace|dict|thinking|reasoning\w*|tools|documents)\b"
)
_LARGEST_VOCABULARY = 100_000
"""Above it transformers looks whether the tokenizer is one that was published with a mistake."""


class PlainTokenizer:
    """The part of a transformers tokenizer that rendering needs, under the same names.

    Args:
        special: `eos_token` and alike, as the template sees them.
    """

    def __init__(self, backend: Tokenizer, *, chat_template: str, special: Mapping[str, str]) -> None:
        self.chat_template = chat_template
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        self.all_special_ids = [backend.token_to_id(token) for token in special.values()]
        self.eos_token_id = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        self._backend = backend
        self._special = dict(special)
        self._template = _compiled(chat_template)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Return the ids of a text."""
        return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token, `None` if it is not in the vocabulary."""
        return self._backend.token_to_id(token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Return the conversation as text; `tokenize` is there for the signature and must be false.

        Raises:
            jinja2.TemplateError: if the template refuses the conversation.
        """
        if tokenize:
            raise ValueError("a plain tokenizer renders text only")
        return self._template.render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special,
        )


def load_plain(path: Path) -> PlainTokenizer | None:
    """Return the tokenizer of a directory, or `None` where it must be read by transformers."""
    template = _template_of(path)
    special = None if template is None else _special_of(path)
    if template is None or special is None or _ADDED_BY_TRANSFORMERS.search(template):
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:
        # The library has no exception of its own. transformers reads it again and says what is wrong.
        if type(error) is Exception:
            return None
        raise
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    plain = (
        all(token in added and added[token].special for token in special.values())
        and backend.truncation is None
        and backend.padding is None
        and backend.get_vocab_size(with_added_tokens=True) <= _LARGEST_VOCABULARY
    )
    return PlainTokenizer(backend, chat_template=template, special=special) if plain else None


def _template_of(path: Path) -> str | None:
    if any((path / name).exists() for name in _OTHER_SOURCES):
        return None
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8") or None
    except (OSError, ValueError):
        return None


def _special_of(path: Path) -> dict[str, str] | None:
    """Return the named special tokens, or `None` if the configuration says more than is known here."""
    try:
        config: Any = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(config, dict) and config.keys() <= {*_SPECIAL, *_CHANGE_NOTHING}
    if not known or config.get("tokenizer_class") not in _CLASSES or config.get("clean_up_tokenization_spaces"):
        return None
    special = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
    return special if all(isinstance(token, str) for token in special.values()) else None


def _compiled(template: str) -> jinja2.Template:
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)
