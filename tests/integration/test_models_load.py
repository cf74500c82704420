"""Prepared models and checkpoints, loaded by transformers as a user would."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rollmill.errors import ModelError
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.weights import inspect, model_files, prepare, write_checkpoint
from rollmill.weights.catalog import catalog, packaged_gguf
from rollmill.weights.prepare import find_prepared
from rollmill.weights.tensorfile import digest_file, load_tensors, whole_digest

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return prepare("tiny-llama", cache_dir=tmp_path_factory.mktemp("cache")).path


def test_the_tiny_tokenizer_maps_characters_to_ascii_codes(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer("A1\n <|im_end|>").input_ids == [65, 49, 10, 32, 2]
    assert tokenizer("\u00e9").input_ids == [3]
    assert tokenizer.decode([49, 50, 32, 43, 10]) == "12 +\n"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 128)
    messages = [{"role": "user", "content": "1+1"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"


def test_a_checkpoint_loads_in_transformers_with_the_trained_weights(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3.0)
    path = write_checkpoint(
        tmp_path,
        optimizer_step=1,
        model_tensors=dict(model.named_parameters()),
        optimizer_tensors={},
        commit={},
        trainer_state={},
        extra_files=model_files(tiny),
    )
    loaded = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([[65, 49, 43]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(path).chat_template
    assert prepare(path).parameters == inspect(tiny).parameters


def test_two_processes_prepare_one_model_at_once(tmp_path):
    script = (
        "import sys\n"
        "from rollmill.weights import prepare\n"
        "sys.stdin.readline()\n"
        f"print(prepare('tiny-llama', cache_dir={str(tmp_path)!r}).digest)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    digests = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(digests) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-1"]


@pytest.mark.slow
def test_smollm2_is_dequantised_as_transformers_reads_the_gguf(tmp_path):
    entry = next(entry for entry in catalog() if entry.name == "smollm2-135m-instruct")
    if not entry.installed:
        pytest.skip("the extra smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    prepared = prepare(entry.name, cache_dir=tmp_path)
    facts = inspect(prepared.path)
    assert facts.parameters == entry.parameters == 134_515_008
    assert facts.tied
    # 2 * 30 layers * 3 kv heads * 64 numbers of 4 bytes.
    assert facts.kv_bytes_per_token(4) == 46_080
    ours = load_tensors(prepared.path / "model.safetensors")
    assert prepared.digest == whole_digest(digest_file(prepared.path / "model.safetensors"))

    model = AutoModelForCausalLM.from_pretrained(prepared.path)
    theirs = load_gguf_checkpoint(str(packaged_gguf(entry)), return_tensors=True, model_to_load=model)["tensors"]
    assert ours.keys() == {name for name in theirs if name != "lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, torch.as_tensor(theirs[name])), name

    tokenizer = AutoTokenizer.from_pretrained(prepared.path)
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


@pytest.fixture
def smollm2():
    found = find_prepared("smollm2-135m-instruct")
    if found is None:
        pytest.skip("the model is not prepared: `rollmill model prepare smollm2-135m-instruct`")
    return found


def test_a_real_model_is_served_in_bfloat16_and_one_whose_cache_is_wrong_is_not(smollm2, monkeypatch):
    tensors = {name: tensor.bfloat16() for name, tensor in load_tensors(smollm2 / "model.safetensors").items()}
    served = ServedModel(smollm2, dtype=torch.bfloat16, tensors=tensors)
    assert served.vocabulary_size == 49152
    packed = ServedModel._packed_logits

    def forgets_the_start(self, ids, *, first):
        whole = packed(self, ids, first=first)
        whole[first:] = packed(self, ids[first:], first=1)
        return whole

    monkeypatch.setattr(ServedModel, "_packed_logits", forgets_the_start)
    with pytest.raises(ModelError, match="differ from the model's own"):
        ServedModel(smollm2, dtype=torch.bfloat16, tensors=tensors)
