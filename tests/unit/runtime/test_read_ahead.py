"""What trainer and replicas read before the preflight has ended, and when they do not."""

from types import SimpleNamespace

import pytest

from rollmill.config.schema import RollmillConfig
from rollmill.errors import ModelError, WeightError
from rollmill.runtime.ahead import read_ahead, read_once
from rollmill.runtime.layout import ProcessLayout
from rollmill.weights.prepare import prepare


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A process of a first start, whose model is prepared."""
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    prepare("tiny-llama")
    config = RollmillConfig.model_validate(
        {
            "run": {"name": "tiny"},
            "model": {"source": "tiny-llama"},
            "environment": {"tasks": [{"name": "basic_arithmetic"}]},
        }
    )
    layout = ProcessLayout(tmp_path / "run")
    layout.processes.mkdir(parents=True)
    return SimpleNamespace(config=config, layout=layout, incarnation=SimpleNamespace(number=1), spawned_for=1)


def test_a_model_that_is_ready_is_read_before_the_preflight_has_ended(context):
    path, model = read_ahead(context, lambda path: f"the model in {path}")
    assert model == f"the model in {path}"
    assert path.endswith("tiny-llama-1")


def test_nothing_is_read_ahead_once_the_preflight_has_ended(context):
    context.layout.preflight.write_text("{}")
    assert read_ahead(context, lambda path: path) is None


def test_nothing_is_read_ahead_by_a_process_whose_incarnation_has_not_begun(context):
    context.spawned_for = 2
    assert read_ahead(context, lambda path: path) is None


def test_a_model_that_is_not_ready_waits_for_the_preflight(context, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "empty"))
    assert read_ahead(context, lambda path: path) is None


@pytest.mark.parametrize("error", [ModelError("it lacks something"), WeightError("a damaged file")])
def test_what_is_wrong_with_a_model_is_left_to_the_preflight(context, error):
    def read(path):
        raise error

    assert read_ahead(context, read) is None


def test_another_error_is_not_swallowed(context):
    def read(path):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_ahead(context, read)


def test_what_was_read_ahead_is_not_read_again():
    def read(path):
        raise AssertionError(path)

    assert read_once("/models/a", ahead=("/models/a", "early"), read=read) == "early"
    # It was looked for, and nothing was there to be read: that is an answer too.
    assert read_once("/models/a", ahead=("/models/a", None), read=read) is None


@pytest.mark.parametrize("ahead", [None, ("/models/b", "early")])
def test_what_was_not_read_ahead_or_is_another_model_is_read_when_it_is_needed(ahead):
    assert read_once("/models/a", ahead=ahead, read=lambda path: f"the model in {path}") == "the model in /models/a"
