"""A setting that the chosen engine does not obey is refused with the engines that do."""

import typing
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.config.engines import OBEYED_BY
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["generator.tensor_parallel_size=2"],
            'generator.tensor_parallel_size is 2 and generator.engine is "embedded".*Engines that have it: vllm.*'
            'or generator.engine "vllm"',
        ),
        (["generator.engine=vllm", "generator.kernels=torch"], "Engines that have it: embedded"),
        (["generator.vllm.load_poll_s=2.0"], r"generator.vllm.load_poll_s is 2.0 .*Engines that have it: vllm"),
        (["generator.quantization=fp8"], r'"embedded", which cannot round to it.*"int8", or generator.engine "vllm"'),
        (
            ["generator.engine=vllm", "generator.quantization=int8"],
            r'"vllm", which cannot round to it.*generator.quantization "fp8", or generator.engine "embedded"',
        ),
        (["generator.engine=sglang", "generator.quantization=fp8"], "Engines that have it: embedded, vllm"),
        (["generator.engine=vllm", "run.deterministic=true"], "Engines that can: embedded, fake"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_with_the_engines_that_have_it(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides=overrides)


def test_the_same_settings_are_taken_by_the_engine_that_has_them():
    overrides = ["generator.engine=vllm", "generator.tensor_parallel_size=2", "generator.vllm.load_poll_s=2.0"]
    assert load_config(None, overrides=overrides).config.generator.tensor_parallel_size == 2


def test_the_table_names_settings_and_engines_that_exist():
    assert set(OBEYED_BY) <= set(GeneratorSettings.model_fields)
    known = set(typing.get_args(GeneratorSettings.model_fields["engine"].annotation))
    assert {engine for engines in OBEYED_BY.values() for engine in engines} <= known


def test_the_page_shows_the_table_as_it_is():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "generator.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    header = next(row for row in rows if row[:2] == ["Setting", "embedded"])
    shown = {row[0].strip("`"): row for row in rows if len(row) == len(header)}
    for setting, engines in OBEYED_BY.items():
        if setting in ("vllm", "sglang"):  # tables of one engine alone
            continue
        said = tuple(engine for engine, cell in zip(header[1:4], shown[setting][1:4], strict=True) if cell == "yes")
        assert said == engines, setting
