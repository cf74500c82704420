"""The renderer over a small tokenizer that is built here, with a chat template in the style of real models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollmill.environments import Renderer, check_lengths
from rollmill.errors import DataError, ModelError
from rollmill.testing import ScriptedEnvironment, ToyTokenizer
from rollmill.types import Message

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|stop|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER = Message(role="user", content="What is 2 + 2?")


def build_model(folder: Path, *, template: str | None = TEMPLATE, eos: str | None = "<|end|>") -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|start|>", "<|stop|>", "<|end|>", "<|other|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return build_model(tmp_path_factory.mktemp("model"))


def raw(renderer: Renderer, ids: np.ndarray) -> str:
    return renderer._tokenizer.decode(ids.tolist())  # with special tokens, which `decode` leaves out


def test_a_prompt_is_the_chat_templates_own_text_with_the_policys_turn_opened(model: Path) -> None:
    renderer = Renderer(model)
    ids = renderer.render([USER])
    assert ids.dtype == np.int32
    assert raw(renderer, ids) == (
        "<|start|>system\nBe kind.<|stop|>\n<|start|>user\nWhat is 2 + 2?<|stop|>\n<|start|>assistant\n"
    )


def test_a_system_prompt_replaces_the_templates_default(model: Path) -> None:
    renderer = Renderer(model)
    text = raw(renderer, renderer.render([Message(role="system", content="Count."), USER]))
    assert "Count." in text
    assert "Be kind." not in text


def test_sampled_ids_decode_without_special_tokens_and_encode_to_themselves(model: Path) -> None:
    renderer = Renderer(model)
    reply = "It is 4, of course \N{GRINNING FACE}."
    prompt = renderer.render([USER])
    whole = renderer.render([USER, Message(role="assistant", content=reply)])
    output = whole[len(prompt) :]
    assert renderer.extends(prompt, whole)
    assert renderer.decode(output).startswith(reply)
    assert "<|" not in renderer.decode(output)


def test_a_prompt_extends_another_only_id_by_id(model: Path) -> None:
    renderer = Renderer(model)
    ids = renderer.render([USER])
    assert renderer.extends(ids, ids)
    assert not renderer.extends(ids, ids[:-1])
    changed = ids.copy()
    changed[3] += 1
    assert not renderer.extends(changed, np.append(ids, 1))


def test_stop_tokens_are_end_of_text_end_of_turn_and_what_the_model_configures(model: Path, tmp_path: Path) -> None:
    names = Renderer(model)._tokenizer
    stop, end, other = (names.convert_tokens_to_ids(token) for token in ("<|stop|>", "<|end|>", "<|other|>"))
    assert Renderer(model).stop_token_ids == tuple(sorted((stop, end)))
    configured = build_model(tmp_path)
    (configured / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, end]}))
    assert Renderer(configured).stop_token_ids == tuple(sorted((stop, end, other)))


def test_a_model_in_which_nothing_ends_a_reply_is_refused(tmp_path: Path) -> None:
    bare = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    with pytest.raises(ModelError, match="nothing ends a reply"):
        Renderer(build_model(tmp_path, template=bare, eos=None))


def test_a_tokenizer_without_chat_template_is_refused_with_the_next_action(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*Use an instruction-tuned model"):
        Renderer(build_model(tmp_path, template=None))


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        Renderer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Renderer(tmp_path)


def test_a_conversation_that_the_template_refuses_is_a_data_error(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    renderer = Renderer(build_model(tmp_path, template=strict))
    with pytest.raises(DataError, match=r"no system role.*leave model.system_prompt unset"):
        renderer.render([Message(role="system", content="Count."), USER])


def test_lengths_are_checked_over_all_tasks_and_the_longest_is_returned() -> None:
    # "0 + 1 =" is 7 characters, "10 + 1 =" is 8; with role, end of turn and the policy's role: 10 and 11 tokens
    toy = ToyTokenizer()
    environment = ScriptedEnvironment(size=10, heldout_size=1)
    assert check_lengths(environment, toy, max_model_len=40, max_new_tokens=29) == 11
    with pytest.raises(DataError, match=r"task sum-10 has 11 tokens, but only 10 fit.*40 - .*30.*41 or more.* to 29"):
        check_lengths(environment, toy, max_model_len=40, max_new_tokens=30)
    with pytest.raises(DataError, match=r"only 0 fit.*Raise generator.max_model_len to 21 or more, or choose shorter"):
        check_lengths(environment, toy, max_model_len=8, max_new_tokens=10)
