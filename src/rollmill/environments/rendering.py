"""From messages to prompt ids, and from sampled ids to text.

Uses the model's own tokenizer and chat template, so that a prompt is what the model was taught. It never rebuilds
token ids from text that was sampled; whether a later prompt extends what was sampled is checked exactly, id by id.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollmill.environments.plain_tokenizer import PlainTokenizer, load_plain
from rollmill.environments.protocol import Environment
from rollmill.errors import DataError, MissingExtraError, ModelError
from rollmill.types import Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "rollmill"
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")


class MessageRenderer(Protocol):
    """Messages to ids and back, for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply, ascending."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, special ones included."""
        ...

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Return int32 [prompt_tokens]: the conversation, ready for the policy's next reply."""
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of sampled ids, without special tokens."""
        ...

    def extends(self, prefix_ids: np.ndarray, ids: np.ndarray) -> bool:
        """Return whether `ids` begins with exactly `prefix_ids`."""
        ...


class Renderer:
    """The renderer of a local Hugging Face model directory.

    Args:
        model_path: the directory; nothing is fetched.

    Raises:
        ModelError: if there is no tokenizer, it has no chat template, or no token ends a reply.
        MissingExtraError: if transformers is needed and not installed; see `plain_tokenizer`.
    """

    def __init__(self, model_path: Path | str) -> None:
        self._path = Path(model_path)
        self._tokenizer = _load_tokenizer(self._path)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer in {self._path} has no chat template, so messages cannot become a prompt. Use an "
                "instruction-tuned model, or put its chat_template.jinja into that directory."
            )
        self._stop_token_ids = _stop_token_ids(self._tokenizer, path=self._path)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End of text (tokenizer and generation_config.json) and the template's own end of a turn, ascending."""
        return self._stop_token_ids

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, special ones included."""
        return len(self._tokenizer)

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Return int32 [prompt_tokens]: the chat template's rendering with the opening of the policy's turn.

        Raises:
            DataError: if the template refuses the conversation.
        """
        return np.asarray(_encode(self._tokenizer, messages, opening=True), dtype=np.int32)

    def encode(self, text: str) -> np.ndarray:
        """Return int32 [tokens] of plain text, without the chat template; with the beginning that the model expects."""
        return np.asarray(self._tokenizer(text, add_special_tokens=True)["input_ids"], dtype=np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of sampled ids, without special tokens."""
        decoded = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return decoded if isinstance(decoded, str) else "".join(decoded)

    def identity(self) -> str:
        """Return a digest of everything that decides how messages become ids: the model's files and the library."""
        digest = hashlib.sha256(f"{importlib.metadata.version('transformers')}".encode())
        for file in sorted(self._path.iterdir()):
            if file.suffix in _TOKENIZER_SUFFIXES and file.is_file():
                digest.update(f"\x1e{file.name}\x1f".encode() + file.read_bytes())
        return digest.hexdigest()

    def extends(self, prefix_ids: np.ndarray, ids: np.ndarray) -> bool:
        """Return whether `ids` begins with exactly `prefix_ids`; if not, the next turn is a new segment."""
        return extends(prefix_ids, ids)


def extends(prefix_ids: np.ndarray, ids: np.ndarray) -> bool:
    """Return whether `ids` begins with exactly `prefix_ids`.

    Example:
        >>> extends(np.array([1, 2]), np.array([1, 2, 3]))
        True
        >>> extends(np.array([1, 2]), np.array([1, 3, 2]))
        False
    """
    return len(ids) >= len(prefix_ids) and bool(np.array_equal(ids[: len(prefix_ids)], prefix_ids))


def prompts_key(environment: Environment, *, identity: str) -> str:
    """Return a digest of all distinct prompts and of what turns them into tokens; costs a tenth of rendering them.

    Args:
        identity: of the renderer.
    """
    digest = hashlib.sha256(identity.encode())
    for task in _distinct_tasks(environment):
        for message in environment.reset(task).messages:
            digest.update(f"\x1e{message.role}\x1f{message.content}".encode())
        digest.update(b"\x1d")
    return f"longest prompt {digest.hexdigest()}"


def check_lengths(
    environment: Environment, renderer: MessageRenderer, *, max_model_len: int, max_new_tokens: int
) -> int:
    """Return the longest prompt in tokens, once the prompt of every task leaves room for a full reply.

    Args:
        environment: all its tasks are looked at, held-out ones included.
        renderer: of the model that will be trained.
        max_model_len: longest prompt plus output, in tokens.
        max_new_tokens: cap on output tokens.

    Raises:
        DataError: naming the task and both numbers.
    """
    longest, room = 0, max_model_len - max_new_tokens
    for task in _distinct_tasks(environment):
        length = len(renderer.render(environment.reset(task).messages))
        if length > room:
            shorter = (
                f", or lower sampling.max_new_tokens to {max_model_len - length}" if length < max_model_len else ""
            )
            raise DataError(
                f"the prompt of task {task.task_id} has {length} tokens, but only {max(room, 0)} fit: "
                f"generator.max_model_len {max_model_len} - sampling.max_new_tokens {max_new_tokens}. Raise "
                f"generator.max_model_len to {length + max_new_tokens} or more{shorter}, or choose shorter tasks."
            )
        longest = max(longest, length)
    return longest


def _distinct_tasks(environment: Environment) -> Iterable[Task]:
    training = (environment.task_at(index) for index in range(environment.training_size()))
    return {task.task_id: task for task in itertools.chain(environment.heldout(), training)}.values()


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase | PlainTokenizer:
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory. Prepare the model first: rollmill model prepare NAME.")
    plain = load_plain(path)
    if plain is not None:
        return plain
    try:
        # The plain class reads tokenizer.json as it stands and loads in half the time of AutoTokenizer, which is for
        # directories in older forms. Neither needs torch.
        if (path / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except ModuleNotFoundError as error:
        raise MissingExtraError(package="transformers", extra="torch", purpose="rendering chat messages") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}. The directory needs "
            "tokenizer.json and tokenizer_config.json of the model; prepare it again, or copy them there."
        ) from error


def _encode(
    tokenizer: PreTrainedTokenizerBase | PlainTokenizer, messages: Sequence[Message], *, opening: bool
) -> list[int]:
    import jinja2

    conversation = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=opening)
    except jinja2.TemplateError as error:
        roles = [message.role for message in messages]
        raise DataError(
            f"the model's chat template refuses a conversation with the roles {roles}: {error}. If it takes no system "
            "message, leave model.system_prompt unset."
        ) from error
    # The template writes the special tokens itself; adding them again would double the first one.
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


def _stop_token_ids(tokenizer: PreTrainedTokenizerBase | PlainTokenizer, *, path: Path) -> tuple[int, ...]:
    stops = set(_configured_stops(path))
    if isinstance(tokenizer.eos_token_id, int):
        stops.add(tokenizer.eos_token_id)
    end_of_turn = _end_of_turn(tokenizer)
    if end_of_turn is not None:
        stops.add(end_of_turn)
    if not stops:
        raise ModelError(
            f"nothing ends a reply: the tokenizer in {path} has no end-of-text token and its chat template closes a "
            "turn without a special token. Set eos_token in tokenizer_config.json."
        )
    return tuple(sorted(stops))


def _configured_stops(path: Path) -> list[int]:
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    try:
        configured: Any = json.loads(file.read_text()).get("eos_token_id")
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}. Copy it again from the model.") from error
    listed = configured if isinstance(configured, list) else [configured]
    return [stop for stop in listed if isinstance(stop, int)]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase | PlainTokenizer) -> int | None:
    """Return the special token with which the template closes the policy's turn, `None` where it has none."""
    opened = [Message(role="user", content=_PROBE)]
    closed = [*opened, Message(role="assistant", content=_PROBE)]
    prompt = _encode(tokenizer, opened, opening=True)
    whole = _encode(tokenizer, closed, opening=False)
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    tail = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
    return next((token for token in tail if token in special), None)
