"""Which floating-point precision a process computes in.

Decides what `auto` means on this CPU, once for trainer and generator. Does not look at torch, which would report
bfloat16 support on CPUs that only emulate it (measured: six times slower than float32 on AVX2).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.config.schema import RollmillConfig

Precision = Literal["float32", "bfloat16"]

NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""CPU flags under which a bfloat16 product is one instruction."""


def cpu_flags(*, cpuinfo: str | None = None) -> frozenset[str]:
    """Return what this CPU can do, in the words of Linux.

    Args:
        cpuinfo: text of `/proc/cpuinfo`; read from the machine if `None`, and nothing where there is none.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:  # not Linux: nothing known, so the precision that always works
            return frozenset()
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(values.split())
    return frozenset(flags)


def native_bfloat16(*, cpuinfo: str | None = None) -> bool:
    """Return whether this CPU multiplies bfloat16 natively.

    Args:
        cpuinfo: as in `cpu_flags`.
    """
    return not NATIVE_BFLOAT16_FLAGS.isdisjoint(cpu_flags(cpuinfo=cpuinfo))


def packed_precision(
    dtype: Precision, *, kernels: Literal["auto", "native", "torch"], cpuinfo: str | None = None
) -> Precision | None:
    """Return in which precision the generator's compiled kernels keep weights, or `None` if torch multiplies.

    Where the CPU has no bfloat16 product they keep the rounded numbers in float32. Where it has one of tiles (AMX),
    torch's has not been measured against theirs, which are used only if insisted on. Whether the kernels can be had is
    not looked at.

    Args:
        dtype: serving precision.
        kernels: `generator.kernels`.
        cpuinfo: as in `cpu_flags`.
    """
    if kernels == "torch":
        return None
    if dtype == "float32":
        return "float32"
    flags = cpu_flags(cpuinfo=cpuinfo)
    if kernels == "auto" and "amx_bf16" in flags:
        return None
    return "bfloat16" if "avx512_bf16" in flags else "float32"


def resolve_dtype(name: str, *, cpuinfo: str | None = None) -> Precision:
    """Return the precision that a setting means here.

    Args:
        name: `auto`, `float32` or `bfloat16`; `auto` takes bfloat16 only where it is native.
        cpuinfo: as in `native_bfloat16`.

    Raises:
        ConfigError: if the name is none of these.

    Example:
        >>> resolve_dtype("auto", cpuinfo="flags : fma avx2")
        'float32'
        >>> resolve_dtype("auto", cpuinfo="flags : avx2 avx512_bf16")
        'bfloat16'
    """
    if name == "auto":
        return "bfloat16" if native_bfloat16(cpuinfo=cpuinfo) else "float32"
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"unknown dtype {name!r}: write 'auto', 'float32' or 'bfloat16'")
    return cast(Precision, name)


def is_exact(config: RollmillConfig) -> bool:
    """Return whether trainer and engine both compute in float32, so that their log-probs agree to rounding.

    bfloat16 rounds at other places in a packed and in a cached pass: equal precision is not equal bits there.
    """
    generator = config.generator
    return (
        resolve_dtype(config.trainer.dtype) == "float32" == resolve_dtype(generator.dtype)
        and generator.quantization == "none"
    )
