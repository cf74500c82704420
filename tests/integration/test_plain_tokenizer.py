"""Without transformers, prompts and texts are those that transformers makes, id by id and letter by letter."""

import json
import random

import numpy as np
import pytest

from rollmill.environments.plain_tokenizer import load_plain
from rollmill.environments.rendering import Renderer
from rollmill.errors import ModelError
from rollmill.types import Message
from rollmill.weights.prepare import find_prepared, prepare

pytestmark = pytest.mark.integration
TEXTS = [
    "12 + 30 = ?",
    "",
    "  two  spaces ",
    "line\nline\r\n",
    "<|im_end|>",
    "Gr\u00fc\u00dfe \u4f60\u597d \U0001f680 e\u0301",
    "a" * 300,
]


def directory(name, folder):
    ready = find_prepared(name)
    if name != "tiny-llama" and ready is None:
        pytest.skip(f"{name} is not prepared")
    path = folder / "model"
    path.mkdir()
    for file in (ready or prepare(name, cache_dir=folder / "cache").path).iterdir():
        if file.suffix in (".json", ".jinja"):
            (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(params=["tiny-llama", "smollm2-135m-instruct"])
def both(request, tmp_path):
    """The plain tokenizer of a model, and that of transformers."""
    from transformers import PreTrainedTokenizerFast

    path = directory(request.param, tmp_path)
    plain = load_plain(path)
    assert plain is not None
    return plain, PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)


def conversations():
    for text in TEXTS:
        yield [("user", text)]
        yield [("system", text), ("user", "7"), ("assistant", text), ("user", text)]
        yield [("assistant", text)]


def test_every_prompt_has_the_same_ids(both):
    plain, theirs = both
    for turns in conversations():
        messages = [{"role": role, "content": content} for role, content in turns]
        for opening in (True, False):
            text = plain.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)
            assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)
            ids = plain(text, add_special_tokens=False)["input_ids"]
            assert ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_every_id_and_any_ids_decode_to_the_same_text(both):
    plain, theirs = both
    assert len(plain) == len(theirs)
    rng = random.Random(3)
    mixed = [[rng.randrange(len(plain)) for _ in range(rng.randrange(12))] for _ in range(300)]
    for ids in [[index] for index in range(0, len(plain), 1 + len(plain) // 2000)] + mixed:
        for skip in (True, False):
            assert plain.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_the_special_tokens_are_the_same(both):
    plain, theirs = both
    assert plain.eos_token_id == theirs.eos_token_id
    assert {*plain.all_special_ids, *plain.added_tokens_decoder} == {
        *theirs.all_special_ids,
        *theirs.added_tokens_decoder,
    }


@pytest.mark.parametrize("name", ["tiny-llama", "smollm2-135m-instruct"])
def test_the_renderer_needs_no_transformers_and_says_the_same(name, tmp_path):
    path = directory(name, tmp_path)
    renderer = Renderer(path)
    # A setting that the plain one does not know, and that changes nothing.
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    assert load_plain(path) is None
    by_transformers = Renderer(path)
    assert renderer.stop_token_ids == by_transformers.stop_token_ids
    assert renderer.vocabulary_size == by_transformers.vocabulary_size
    for turns in conversations():
        messages = [Message(role=role, content=content) for role, content in turns]
        ids = renderer.render(messages)
        assert np.array_equal(ids, by_transformers.render(messages))
        assert renderer.decode(ids) == by_transformers.decode(ids)


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"eos_token": {"content": "<|im_end|>"}},
        {"eos_token": "<|nowhere|>"},
        {"clean_up_tokenization_spaces": True},
        {"tokenizer_class": "LlamaTokenizer"},
        {"chat_template": "{{ messages }}"},
    ],
)
def test_what_a_configuration_says_beyond_the_known_is_left_to_transformers(change, tmp_path):
    path = directory("tiny-llama", tmp_path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **change}))
    assert load_plain(path) is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ strftime_now('%Y') }}",
        "{% set ns = namespace(n=1) %}{{ ns.n }}",
        "{% if tools %}{% endif %}",
        "{{ messages[0].reasoning_content }}",
        "",
    ],
)
def test_a_template_that_uses_what_transformers_adds_is_left_to_it(template, tmp_path):
    path = directory("tiny-llama", tmp_path)
    (path / "chat_template.jinja").write_text(template)
    assert load_plain(path) is None


def test_files_that_are_missing_or_damaged_get_the_words_of_before(tmp_path):
    path = directory("tiny-llama", tmp_path)
    (path / "tokenizer.json").write_text("{")
    assert load_plain(path) is None
    with pytest.raises(ModelError, match="cannot be loaded"):
        Renderer(path)
    (path / "tokenizer_config.json").write_text("[")
    assert load_plain(path) is None
    (path / "chat_template.jinja").unlink()
    assert load_plain(path) is None
