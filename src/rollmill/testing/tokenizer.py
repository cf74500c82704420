"""A character-level tokenizer that renders messages without a chat template."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from rollmill.environments.rendering import extends
from rollmill.errors import DataError
from rollmill.types import Message

_SPECIAL = ("<end>", "<system>", "<user>", "<assistant>", "<tool>", "<end_of_turn>")
_CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation


class ToyTokenizer:
    """One id per character, one per role; implements `rollmill.environments.MessageRenderer`.

    Example:
        >>> toy = ToyTokenizer()
        >>> ids = toy.render([Message(role="user", content="2+2?")])
        >>> len(ids)  # role, four characters, end of turn, the policy's role
        7
        >>> toy.decode(ids)
        '2+2?'
    """

    end_of_text_id = 0
    end_of_turn_id = _SPECIAL.index("<end_of_turn>")

    def __init__(self) -> None:
        self._ids = {character: len(_SPECIAL) + i for i, character in enumerate(_CHARACTERS)}
        self._roles = {name.strip("<>"): i for i, name in enumerate(_SPECIAL)}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End of text and end of a turn."""
        return (self.end_of_text_id, self.end_of_turn_id)

    @property
    def vocabulary_size(self) -> int:
        """Special tokens and characters."""
        return len(_SPECIAL) + len(_CHARACTERS)

    def encode(self, text: str) -> list[int]:
        """Return one id per character.

        Raises:
            DataError: if a character is outside printable ASCII.
        """
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise DataError(f"the toy tokenizer has no ids for {unknown!r}; it knows printable ASCII and newline.")
        return [self._ids[character] for character in text]

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Return int32 [prompt_tokens]: role, characters, end of turn per message; then the policy's role."""
        ids: list[int] = []
        for message in messages:
            ids += [self._roles[message.role], *self.encode(message.content), self.end_of_turn_id]
        return np.array([*ids, self._roles["assistant"]], dtype=np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the characters; special tokens are left out."""
        return "".join(_CHARACTERS[int(i) - len(_SPECIAL)] for i in ids if int(i) >= len(_SPECIAL))

    def extends(self, prefix_ids: np.ndarray, ids: np.ndarray) -> bool:
        """Return whether `ids` begins with exactly `prefix_ids`."""
        return extends(prefix_ids, ids)
