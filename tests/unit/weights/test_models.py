"""Models by name, by directory, by hub; and what is refused, with the next action."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmill.errors import MissingExtraError, ModelError
from rollmill.weights import catalog, find_prepared, inspect, prepare
from rollmill.weights.catalog import CatalogEntry, cache_directory, packaged_gguf
from rollmill.weights.tensorfile import digest_file, whole_digest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return prepare("tiny-llama", cache_dir=tmp_path_factory.mktemp("cache")).path


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    """A model directory that a test may damage, without our sidecar."""
    path = tmp_path / "model"
    shutil.copytree(tiny, path)
    (path / "rollmill.json").unlink()
    return path


def edit(file: Path, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_the_tiny_llama_has_the_numbers_that_are_published(tiny):
    facts = inspect(tiny)
    # Embedding 128*64 = 8192; a layer: q 64*64 + k, v 2*32*64 + o 64*64 + three of 64*128 + two norms of 64 = 36992;
    # two layers 73984; last norm 64.
    assert facts.parameters == 8192 + 2 * 36992 + 64 == 82240
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim, facts.hidden_size) == (2, 4, 2, 16, 64)
    assert (facts.vocabulary_size, facts.max_positions, facts.dtype, facts.tied) == (128, 512, "float32", True)
    # Keys and values: 2 * 2 layers * 2 kv heads * 16 = 128 numbers.
    assert facts.kv_bytes_per_token(4) == 512
    assert facts.kv_bytes_per_token(2) == 256


def test_the_catalogue_tells_true_parameters_of_what_it_makes(tiny):
    entry = next(entry for entry in catalog() if entry.name == "tiny-llama")
    assert entry.parameters == inspect(tiny).parameters
    assert entry.installed


def test_preparing_twice_gives_the_same_weights_everywhere(tiny, tmp_path):
    first = prepare("tiny-llama", cache_dir=tmp_path / "a")
    again = prepare("tiny-llama", cache_dir=tmp_path / "a")
    assert first == again
    assert first.path == tmp_path / "a" / "tiny-llama-1"
    assert first.digest == whole_digest(digest_file(tiny / "model.safetensors"))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["tiny-llama-1"]


def test_looking_for_a_prepared_model_prepares_nothing(copy, tmp_path):
    cache = tmp_path / "cache"
    assert find_prepared("tiny-llama", cache_dir=cache) is None
    assert not cache.exists()
    assert find_prepared("tiny-llama", cache_dir=prepare("tiny-llama", cache_dir=cache).path.parent) is not None
    assert find_prepared(copy) == copy
    assert find_prepared("no/such-model") is None


def test_a_damaged_cache_is_made_again(tmp_path):
    first = prepare("tiny-llama", cache_dir=tmp_path)
    weights = first.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert prepare("tiny-llama", cache_dir=tmp_path) == first
    (first.path / "rollmill.json").write_text("{")
    assert prepare("tiny-llama", cache_dir=tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-1"]


def test_folders_of_dead_preparations_are_cleared(tmp_path):
    dead = tmp_path / "tiny-llama-1.partial-999999999-x"
    living = tmp_path / "tiny-llama-1.partial-1-x"
    dead.mkdir()
    living.mkdir()
    prepare("tiny-llama", cache_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-llama-1", living.name]


def test_the_cache_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path / "models"
    monkeypatch.delenv("ROLLMILL_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "rollmill" / "models"
    assert cache_directory(tmp_path) == tmp_path


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="Set ROLLMILL_CACHE"):
        prepare("tiny-llama", cache_dir=tmp_path / "file" / "cache")


def test_a_local_directory_is_taken_as_it_is(copy):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    model = prepare(copy)
    assert (model.path, model.name, model.dtype, model.parameters) == (copy, str(copy), "float32", 82240)
    assert model.digest == whole_digest(digest_file(copy / "model.safetensors"))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_shards_count_together(copy):
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    whole = prepare(copy)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    assert prepare(copy) == whole
    (copy / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files, first b\.safetensors"):
        prepare(copy)


def test_a_tokenizer_of_a_larger_model_is_refused_with_both_numbers(copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["extra"] = 128
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"ids up to 128, but the model embeds 128 tokens \(ids 0 to 127\)"):
        prepare(copy)


def test_an_added_token_beyond_the_embedding_is_refused(copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 200, "content": "<|new|>"})
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="ids up to 200"):
        prepare(copy)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("config.json", r"no config\.json"),
        ("model.safetensors", r"no model\.safetensors"),
        ("tokenizer.json", "no tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_a_missing_file_is_named(copy, name, word):
    (copy / name).unlink()
    with pytest.raises(ModelError, match=word):
        prepare(copy)


def test_a_chat_template_in_the_tokenizer_configuration_counts(copy):
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", chat_template=template)
    assert prepare(copy).parameters == 82240


def test_pickled_weights_are_not_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: convert it"):
        prepare(copy)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not a causal language model"),
        ({"is_encoder_decoder": True}, "it has an encoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind linear_attention"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": None}, "no number 'num_hidden_layers'"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(copy, fields, word):
    edit(copy / "config.json", **fields)
    with pytest.raises(ModelError, match=word):
        prepare(copy)


def test_a_reward_head_is_served_and_not_trained(copy):
    edit(copy / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="is not a causal language model"):
        prepare(copy)
    assert prepare(copy, serving=True).path == copy
    edit(copy / "config.json", architectures=["BertModel"])
    with pytest.raises(ModelError, match="and has no reward head"):
        prepare(copy, serving=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_is_refused_by_name(copy, name):
    if name == "tokenizer_config.json":
        (copy / "chat_template.jinja").unlink()  # else nothing in it is needed
    (copy / name).write_text("{")
    with pytest.raises(ModelError, match=f"{name} is not JSON".replace(".", r"\.")):
        prepare(copy)


def test_a_local_directory_is_digested_anew_whatever_lies_beside_it(tiny, copy):
    shutil.copy(tiny / "rollmill.json", copy)
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.zeros(64)}, copy / "model.safetensors")
    assert prepare(copy).digest == whole_digest(digest_file(copy / "model.safetensors")) != prepare(tiny).digest


def test_truncated_weights_are_refused(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut short"):
        prepare(copy)


def test_an_untied_head_is_counted_and_seen(copy):
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(128, 64)}, copy / "model.safetensors")
    facts = inspect(copy)
    assert (facts.parameters, facts.tied) == (82240 + 8192, False)


def test_an_unknown_name_says_what_was_tried_and_the_nearest_name(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError) as caught:
        prepare("tiny-lama")
    text = str(caught.value)
    assert "HF_HUB_OFFLINE is set" in text
    assert "Did you mean 'tiny-llama'?" in text
    assert "smollm2-135m-instruct" in text
    assert "a local directory" in text


def test_a_path_that_is_not_there_is_no_hub_name():
    with pytest.raises(ModelError, match="there is no such directory, and it is no hub name"):
        prepare("./models/absent/really")


def test_a_package_that_is_not_installed_names_its_extra():
    entry = CatalogEntry(
        name="m",
        description="",
        licence="",
        parameters=1,
        version="1",
        package="no-such-package-xyz",
        install="pip install xyz",
    )
    assert not entry.installed
    with pytest.raises(MissingExtraError, match="pip install xyz"):
        packaged_gguf(entry)


def test_a_package_without_its_file_is_an_error():
    entry = CatalogEntry(
        name="m", description="", licence="", parameters=1, version="1", package="msgspec", install="pip install xyz"
    )
    assert importlib.metadata.version("msgspec")
    with pytest.raises(MissingExtraError, match="gguf"):
        packaged_gguf(entry)
