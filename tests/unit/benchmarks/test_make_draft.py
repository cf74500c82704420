"""A draft made of a model's own layers: which it keeps, and that teaching brings it nearer."""

import importlib.util
from pathlib import Path

import pytest
import torch

from generator_builders import llama, random_model

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "engine" / "make_draft.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_draft", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_draft_keeps_the_first_layers_the_last_one_and_all_that_lies_around_them(script):
    teacher = random_model(llama(num_hidden_layers=5), seed=1)
    draft = script.shortened(teacher, layers=3)
    ours, theirs = draft.state_dict(), teacher.state_dict()
    for mine, its in ((0, 0), (1, 1), (2, 4)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(ours[name.format(mine)], theirs[name.format(its)])
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert draft.config.num_hidden_layers == 3
    whole = script.shortened(teacher, layers=5)
    ids = torch.arange(12)[None]
    assert script.overlap(teacher, whole, [ids]) == pytest.approx(1.0, abs=1e-5)


def test_a_taught_draft_overlaps_more_with_its_model_on_answers_that_it_has_not_seen(script):
    teacher = random_model(llama(num_hidden_layers=4), seed=1)
    draft = script.shortened(teacher, layers=1)
    torch.manual_seed(0)
    samples = [script.answers(teacher, [seed, 7], count=8, new_tokens=20) for seed in range(4)]
    held_out = [script.answers(teacher, [50, 7], count=8, new_tokens=20)]
    before = script.overlap(teacher, draft, held_out)
    left = iter(range(40))
    assert script.teach(teacher, draft, samples, go_on=lambda: next(left, None) is not None, learning_rate=3e-3) == 40
    assert script.overlap(teacher, draft, held_out) > before + 0.05


def test_no_question_of_the_benchmark_is_taught(script):
    asked = script.questions(seed=0)
    taught = {next(asked) for _ in range(200)}
    source = (SCRIPT.parent / "speculation.py").read_text()
    assert len(taught) > 150
    assert not any(question in source for question in taught)
