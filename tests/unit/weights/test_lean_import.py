"""Importing later what is not needed now; whoever needs it gets it."""

import gc
import importlib
import subprocess
import sys

import pytest

from rollmill.weights.lean_import import on_demand, without_collection


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """A package `lean_parent` with a costly subpackage `costly`, which counts how often its code ran."""
    costly = tmp_path / "lean_parent" / "costly"
    costly.mkdir(parents=True)
    (tmp_path / "lean_parent" / "__init__.py").write_text("runs = []\n")
    (costly / "__init__.py").write_text(
        "import lean_parent\nlean_parent.runs.append('costly')\nfrom . import light\nanswer = 42\n"
        "def disable(function=None, recursive=True):\n    return 'the real one'\n"
    )
    (costly / "light.py").write_text("import lean_parent\nlean_parent.runs.append('light')\nname = 'light'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("lean_parent")
    for name in [name for name in sys.modules if name.startswith("lean_parent")]:
        del sys.modules[name]


def test_a_submodule_is_imported_without_the_code_of_its_package(parent):
    with on_demand("lean_parent.costly"):
        light = importlib.import_module("lean_parent.costly.light")
    assert light.name == "light"
    assert parent.runs == ["light"]


def test_the_first_use_of_a_name_runs_the_package_once(parent):
    with on_demand("lean_parent.costly"):
        importlib.import_module("lean_parent.costly.light")
    assert parent.costly.answer == 42
    assert parent.costly.answer == 42
    assert parent.costly.light.name == "light"
    assert parent.runs == ["light", "costly"]


def test_any_other_name_runs_the_package_also_inside_the_block(parent):
    with on_demand("lean_parent.costly"):
        assert parent.costly.answer == 42
    assert parent.runs == ["costly", "light"]


def test_inside_the_block_a_mark_for_the_compiler_gives_the_function_back(parent):
    def function():
        return 1

    with on_demand("lean_parent.costly"):
        assert parent.costly.allow_in_graph(function) is function
        assert parent.costly.assume_constant_result(function) is function
        assert parent.costly.disable(function) is function
        assert parent.costly.disable(recursive=False)(function) is function
    assert parent.runs == []


def test_after_the_block_the_mark_is_the_real_one(parent):
    with on_demand("lean_parent.costly"):
        pass
    assert parent.costly.disable() == "the real one"


def test_a_missing_name_is_an_attribute_error_of_the_package(parent):
    with on_demand("lean_parent.costly"):
        pass
    with pytest.raises(AttributeError, match="missing"):
        _ = parent.costly.missing


def test_a_package_that_is_imported_already_stays_as_it_is(parent):
    loaded = importlib.import_module("lean_parent.costly")
    with on_demand("lean_parent.costly"):
        assert sys.modules["lean_parent.costly"] is loaded


def test_a_package_that_does_not_exist_changes_nothing(parent):
    with on_demand("lean_parent.absent"):
        assert "lean_parent.absent" not in sys.modules


def test_collection_pauses_inside_the_block_only():
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()


def test_what_the_block_made_is_not_looked_at_again():
    try:
        before = gc.get_freeze_count()
        with without_collection():
            kept = [[] for _ in range(1000)]
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


@pytest.mark.integration
def test_a_model_runs_and_trains_without_compiler_and_distributed_tensors_until_they_are_used():
    script = """
import sys
from rollmill.weights.lean_import import import_transformers
import_transformers()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

heavy = ("sympy", "torch._inductor", "torch._dynamo.symbolic_convert", "torch.distributed.tensor", "torchvision",
         "torch._decomp.decompositions", "torch._refs.nn", "scipy", "pandas", "sklearn")
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
with no_init_weights():
    model = LlamaForCausalLM(LlamaConfig(**sizes))
model(torch.arange(4)[None]).logits.sum().backward()
noise = torch.rand(3, generator=torch.Generator().manual_seed(7))
print([name for name in heavy if name in sys.modules])
print(torch.broadcast_shapes((2, 1), (3,)), torch.empty(2, 3, device="meta").to(torch.float64).shape)
optimizer = torch.optim.AdamW(model.parameters())  # uses the compiler's package
optimizer.step()
print("torch._dynamo.symbolic_convert" in sys.modules, torch._dynamo.disable.__module__)
print(torch.equal(noise, torch.rand(3, generator=torch.Generator().manual_seed(7))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "torch.Size([2, 3]) torch.Size([2, 3])",
        "True torch._dynamo.decorators",
        "True",
    ], done.stdout + done.stderr


@pytest.mark.integration
def test_transformers_own_loader_builds_a_model_without_data_after_a_lean_import(tmp_path):
    script = f"""
from rollmill.weights.lean_import import import_transformers, import_operator_definitions
import_transformers()
import torch
from rollmill.trainer.model import _load_by_transformers
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained({str(tmp_path)!r})
model = _load_by_transformers({str(tmp_path)!r})
print(model(torch.arange(4)[None]).logits.shape)
import_operator_definitions()
with torch.device("meta"):
    print(LlamaForCausalLM(LlamaConfig(**sizes))(torch.zeros(1, 4, dtype=torch.long)).logits.shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch.Size([1, 4, 11])"] * 2, done.stdout + done.stderr


@pytest.mark.integration
def test_a_process_of_the_run_imports_no_more_modules_than_now():
    """A budget of modules, which no load on the machine changes: 1,575 when it was set, 2,484 with a plain import."""
    script = """
import sys
from rollmill.weights.lean_import import import_transformers
import_transformers()
print(len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 500 < int(done.stdout) < 1650
