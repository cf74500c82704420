"""What `auto` means on a CPU, and the meter of seconds."""

from __future__ import annotations

import doctest

import pytest

from rollmill.config import precision
from rollmill.config.precision import native_bfloat16, packed_precision, resolve_dtype
from rollmill.errors import ConfigError
from rollmill.generator.engines import meter, sequence


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("fpu avx avx2 fma", False),
        ("avx2 avx512f avx512_bf16", True),
        ("amx_bf16 amx_tile", True),
        ("avx512_bf16x", False),
    ],
)
def test_bfloat16_is_native_only_with_its_own_instructions(flags, native):
    cpuinfo = f"processor : 0\nmodel name : avx512_bf16 in a name\nflags\t\t: {flags}\n"
    assert native_bfloat16(cpuinfo=cpuinfo) is native
    assert resolve_dtype("auto", cpuinfo=cpuinfo) == ("bfloat16" if native else "float32")


def test_a_named_precision_is_taken_as_it_is_and_others_are_refused():
    assert resolve_dtype("bfloat16", cpuinfo="") == "bfloat16"
    assert resolve_dtype("float32", cpuinfo="flags : amx_bf16") == "float32"
    with pytest.raises(ConfigError, match="'float16'"):
        resolve_dtype("float16")


@pytest.mark.parametrize(
    ("flags", "dtype", "kernels", "expected"),
    [
        ("avx2", "float32", "auto", "float32"),
        ("avx2", "bfloat16", "auto", "float32"),  # rounded, and multiplied in float32
        ("avx512f", "bfloat16", "native", "float32"),
        ("avx512_bf16", "float32", "auto", "float32"),
        ("avx512_bf16", "bfloat16", "auto", "bfloat16"),
        ("avx512_bf16 amx_bf16", "bfloat16", "auto", None),
        ("avx512_bf16 amx_bf16", "bfloat16", "native", "bfloat16"),
        ("avx512_bf16 amx_bf16", "float32", "auto", "float32"),
        ("avx512_bf16", "bfloat16", "torch", None),
    ],
)
def test_packed_weights_have_the_precision_that_the_kernels_multiply_in(flags, dtype, kernels, expected):
    assert packed_precision(dtype, kernels=kernels, cpuinfo=f"flags : {flags}") == expected


@pytest.mark.parametrize("module", [precision, meter, sequence])
def test_the_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
