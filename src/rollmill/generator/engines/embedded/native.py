"""Compiles and binds `kernels.c` and `rows.c`, once per machine, and proves the result before use.

Needs an x86-64 CPU with AVX2 and FMA, and a C compiler at the first use; the library is kept under the cache directory
and found by the digest of its sources and flags. The sources make three variants, of which the best that this CPU has
is taken: AVX2; AVX-512, with wider panels and with functions for what lies between products; and that with products in
bfloat16. Decides only which kernels can be used here; without them torch computes the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from rollmill.config.precision import cpu_flags
from rollmill.errors import ModelError
from rollmill.generator.engines.embedded.pages import HugePages, missing
from rollmill.weights.catalog import cache_directory

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "rows.c"))
# Compiled with OpenMP but not linked to a runtime: the symbols are found in the one that torch has loaded, so that
# `torch.set_num_threads` and its pool of threads hold for these kernels too.
_FLAGS = ("-O3", "-mavx2", "-mfma", "-fopenmp", "-fPIC", "-std=gnu11")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VARIANTS = {"avx512_bf16": (*_AVX512, "-mavx512bf16"), "avx512": _AVX512, "avx2": ()}
"""Further flags of each variant, best first."""
_COMPILE_DEADLINE_S = 60.0
_PROOF_TOLERANCE = 1e-5
_BFLOAT16_TOLERANCE = 2.0**-8 + 1e-5
"""Of the largest result: bfloat16 keeps 8 bits, so rounding once is off by 2**-8 of a number at most."""
INT8_GROUP = 32
"""Inputs of an output that share a factor: half the error of one factor for the whole output, an eighth more memory."""
DIM_STEP = 8
"""Attention needs a head dimension that is a multiple of this."""

_log = logging.getLogger(__name__)


class Kernels:
    """The compiled functions, on contiguous tensors of the CPU.

    Args:
        library: the loaded shared library.
        variant: which of the three it is.
    """

    def __init__(self, library: ctypes.CDLL, *, variant: str) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self.variant = variant
        self._pages = HugePages()
        self.bfloat16 = variant == "avx512_bf16"
        """Whether there is a product in bfloat16."""
        self.fuses = variant != "avx2"
        """Whether there are `norm`, `gated`, `rotate` and `block_sums`."""
        library.rollmill_columns.argtypes, library.rollmill_columns.restype = [], number
        self._columns = int(library.rollmill_columns())
        self._pack, self._linear = library.rollmill_pack, library.rollmill_linear
        self._pack.argtypes, self._pack.restype = [pointer, pointer, number, number, number], None
        self._linear.argtypes, self._linear.restype = [pointer] * 3 + [number] * 4, None
        self._pack_int8, self._linear_int8 = library.rollmill_pack_int8, library.rollmill_linear_int8
        self._pack_int8.argtypes, self._pack_int8.restype = [pointer] * 3 + [number] * 3, None
        self._linear_int8.argtypes, self._linear_int8.restype = [pointer] * 4 + [number] * 4, None
        if self.bfloat16:
            self._linear_bf16 = library.rollmill_linear_bf16
            self._linear_bf16.argtypes, self._linear_bf16.restype = [pointer] * 3 + [number] * 4, None
        if self.fuses:
            self._norm, self._gated = library.rollmill_norm, library.rollmill_gated
            self._norm.argtypes = [pointer] * 3 + [number] * 3 + [ctypes.c_float, number]
            self._gated.argtypes = [pointer] * 3 + [number] * 3
            self._rotate = library.rollmill_rotate
            self._rotate.argtypes = [pointer] * 3 + [number] * 5
            self._norm.restype = self._gated.restype = self._rotate.restype = None
            self._block_sums = library.rollmill_block_sums
            self._block_sums.argtypes, self._block_sums.restype = [pointer] * 4 + [number] * 5, None
        self._write = library.rollmill_write
        self._write.argtypes, self._write.restype = ([pointer, number, number] * 2 + [pointer] * 5 + [number] * 5), None
        self._attend = library.rollmill_attend
        self._attend.argtypes = [pointer, number, number, pointer, pointer, number, number, number, pointer, number]
        self._attend.argtypes += [pointer, pointer] + [number] * 4 + [ctypes.c_float, number]
        self._attend.restype = number

    def new_packed(self, *, outputs: int, inputs: int) -> torch.Tensor:
        """Return room for a packed weight of this shape: float32, one dimension."""
        return self._pages.empty(self._padded(outputs) * inputs, dtype=torch.float32)

    def pack(self, weight: torch.Tensor, packed: torch.Tensor, *, threads: int | None = None) -> None:
        """Write `weight`, float32 [outputs, inputs], into room made by `new_packed`, on torch's threads if `None`."""
        outputs, inputs = weight.shape
        self._pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs, threads or torch.get_num_threads())

    def linear(self, rows: torch.Tensor, packed: torch.Tensor, *, outputs: int) -> torch.Tensor:
        """Return `rows @ weight.T`, float32 [..., outputs], for `rows`, float32 [..., inputs]."""
        out, m, inputs = _results(rows, outputs)
        self._linear(rows.data_ptr(), packed.data_ptr(), out.data_ptr(), m, outputs, inputs, torch.get_num_threads())
        return out

    def new_packed_bfloat16(self, *, outputs: int, inputs: int) -> torch.Tensor:
        """Return room for a packed weight of this shape: bfloat16, one dimension."""
        return self._pages.empty(self._padded(outputs) * (inputs + inputs % 2), dtype=torch.bfloat16)

    def pack_bfloat16(self, weight: torch.Tensor, packed: torch.Tensor, *, threads: int | None = None) -> None:
        """Write `weight`, bfloat16 [outputs, inputs], into room made by `new_packed_bfloat16`."""
        pairs = _even(weight).view(torch.float32)  # two numbers as one of 32 bits: the order is that of float32
        self.pack(pairs, packed, threads=threads)

    def linear_bfloat16(self, rows: torch.Tensor, packed: torch.Tensor, *, outputs: int) -> torch.Tensor:
        """Return `rows @ weight.T`, bfloat16 [..., outputs], for `rows`, bfloat16 [..., inputs]; sums are float32."""
        rows = _even(rows)
        out, m, inputs = _results(rows, outputs)
        threads = torch.get_num_threads()
        self._linear_bf16(rows.data_ptr(), packed.data_ptr(), out.data_ptr(), m, outputs, inputs, threads)
        return out

    def new_packed_int8(self, *, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for a weight of this shape in eight bits, and for the factor of each 32 inputs of an output."""
        columns, groups = self._padded(outputs), -(-inputs // INT8_GROUP)
        return (
            self._pages.empty(columns * inputs, dtype=torch.int8),
            self._pages.empty(columns * groups, dtype=torch.float32),
        )

    def pack_int8(
        self, weight: torch.Tensor, packed: torch.Tensor, factors: torch.Tensor, *, threads: int | None = None
    ) -> None:
        """Round `weight`, float32 [outputs, inputs], to 255 steps per factor, into room made by `new_packed_int8`."""
        outputs, inputs = weight.shape
        threads = threads or torch.get_num_threads()
        self._pack_int8(weight.data_ptr(), packed.data_ptr(), factors.data_ptr(), outputs, inputs, threads)

    def linear_int8(
        self, rows: torch.Tensor, packed: torch.Tensor, factors: torch.Tensor, *, outputs: int
    ) -> torch.Tensor:
        """Return `rows @ weight.T`, float32 [..., outputs], for `rows`, float32 [..., inputs], and a rounded weight."""
        out, m, inputs = _results(rows, outputs)
        addresses = (tensor.data_ptr() for tensor in (rows, packed, factors, out))
        self._linear_int8(*addresses, m, outputs, inputs, torch.get_num_threads())
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
        """Return `x` [..., n] over the root of its mean square, times `weight` [n]; both float32 or both bfloat16."""
        x, n = x.contiguous(), len(weight)
        out, half = torch.empty_like(x), x.dtype is torch.bfloat16
        threads = torch.get_num_threads()
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), half, x.numel() // n, n, epsilon, threads)
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return `silu(gate) * up`; both float32 or both bfloat16."""
        gate, up = gate.contiguous(), up.contiguous()
        out, half = torch.empty_like(gate), gate.dtype is torch.bfloat16
        self._gated(gate.data_ptr(), up.data_ptr(), out.data_ptr(), half, gate.numel(), torch.get_num_threads())
        return out

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Turn the heads of each token by the angles of its position, in place: `x * cos + rotate_half(x) * sin`.

        Args:
            x: float32 or bfloat16 [tokens, heads, dim], contiguous; `dim` is even.
            cosines: [tokens, dim] of the same type, contiguous.
            sines: as cosines.
        """
        tokens, heads, dim = x.shape
        addresses = (tensor.data_ptr() for tensor in (x, cosines, sines))
        self._rotate(*addresses, x.dtype is torch.bfloat16, tokens, heads, dim, torch.get_num_threads())

    def block_sums(
        self, logits: torch.Tensor, temperatures: torch.Tensor, *, block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the greatest of each row of scaled logits, and how much each block of them weighs beside it.

        Args:
            logits: float32 or bfloat16 [rows, vocabulary], contiguous.
            temperatures: float32 [rows], what logits are divided by.
            block: numbers of a block.

        Returns:
            float32 [rows] and float32 [rows, blocks], sums of `exp(logit / temperature - greatest)`.
        """
        rows, vocabulary = logits.shape
        greatest, sums = torch.empty(rows), torch.empty(rows, -(-vocabulary // block))
        addresses = (tensor.data_ptr() for tensor in (logits, temperatures, greatest, sums))
        half = logits.dtype is torch.bfloat16
        self._block_sums(*addresses, half, rows, vocabulary, block, torch.get_num_threads())
        return greatest, sums

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        *,
        rows: torch.Tensor | None,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Copy keys and values of tokens to their places.

        Args:
            keys: [kv_heads, tokens, dim].
            values: as keys.
            key_pool: [blocks, kv_heads, size, dim], contiguous, of the same type.
            value_pool: as key_pool.
            rows: int64 [writes], token of each write; `None` writes each once, in order.
            blocks: int64 [writes], contiguous.
            offsets: int64 [writes], place in the block; contiguous.
        """
        kv_heads, size, dim = key_pool.shape[1:]
        width = key_pool.element_size()
        if keys.stride(2) != 1 or values.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        self._write(
            keys.data_ptr(),
            keys.stride(0) * width,
            keys.stride(1) * width,
            values.data_ptr(),
            values.stride(0) * width,
            values.stride(1) * width,
            None if rows is None else rows.data_ptr(),
            blocks.data_ptr(),
            offsets.data_ptr(),
            key_pool.data_ptr(),
            value_pool.data_ptr(),
            key_pool.stride(0) * width,
            len(blocks),
            kv_heads,
            size,
            dim * width,
        )

    def attend(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        tables: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return softmax attention of row b over the first `counts[b]` tokens of the blocks in `tables[b]`.

        Args:
            rows: [batch, heads, dim]; `dim` a multiple of `DIM_STEP`. The result has their type.
            keys: float32 or bfloat16 [blocks, kv_heads, size, dim], contiguous. Sums are float32 either way.
            values: as keys.
            tables: int64 [batch, width], contiguous; blocks behind `counts` are not read.
            counts: int64 [batch], from 1 to `width * size`.
            scale: factor of the scores.
        """
        batch, heads, dim = rows.shape
        kv_heads, size = keys.shape[1:3]
        asked = rows.dtype
        rows = rows.to(torch.float32)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        out = torch.empty(batch, heads, dim, dtype=torch.float32)
        failed = self._attend(
            rows.data_ptr(),
            rows.stride(0),
            rows.stride(1),
            keys.data_ptr(),
            values.data_ptr(),
            keys.dtype == torch.bfloat16,
            keys.stride(0),
            size,
            tables.data_ptr(),
            tables.shape[1],
            counts.data_ptr(),
            out.data_ptr(),
            batch,
            kv_heads,
            heads // kv_heads,
            dim,
            scale,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention scores of {int(counts.max())} tokens")
        return out.to(asked)

    def _padded(self, outputs: int) -> int:
        return -(-outputs // self._columns) * self._columns


def _results(rows: torch.Tensor, outputs: int) -> tuple[torch.Tensor, int, int]:
    """Return room for the results of a product, how many rows there are, and of how many inputs."""
    inputs = rows.shape[-1]
    return torch.empty((*rows.shape[:-1], outputs), dtype=rows.dtype), rows.numel() // inputs, inputs


def _even(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of an even number of columns, zero in one that is added."""
    return torch.nn.functional.pad(rows, (0, 1)) if rows.shape[-1] % 2 else rows


class KernelsUnavailable(ModelError):
    """The compiled kernels cannot be used on this machine."""


def variants(*, cpuinfo: str | None = None) -> tuple[str, ...]:
    """Return the variants that this CPU can run, best first.

    Args:
        cpuinfo: as for `cpu_flags`.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        flags = cpu_flags(cpuinfo=cpuinfo)
        return tuple(name for name in _VARIANTS if name != "avx512_bf16" or name in flags)
    return ("avx2",) if capability.startswith("AVX2") else ()


@functools.cache
def load_kernels() -> Kernels:
    """Return the best kernels for this machine, compiled now if it has not done so before.

    Raises:
        KernelsUnavailable: if the CPU, the compiler or the proof says no; the message has the reason.
    """
    refused: KernelsUnavailable | None = None
    for variant in variants():
        try:
            kernels = load_variant(variant)
        except KernelsUnavailable as error:
            refused = refused or error
            continue
        if refused is not None:
            _log.warning("%s. Those for %s are used instead", refused, variant)
        if (reason := missing()) is not None:
            _log.warning("%s", reason)
        return kernels
    raise refused or _unavailable(
        f"they are written for AVX2 and AVX-512, and torch reports {torch.backends.cpu.get_cpu_capability()}"
    )


@functools.cache
def load_variant(variant: str) -> Kernels:
    """Return one of `variants()`.

    Raises:
        KernelsUnavailable: as by `load_kernels`.
    """
    try:
        kernels = Kernels(ctypes.CDLL(str(_library((*_FLAGS, *_VARIANTS[variant])))), variant=variant)
    except (OSError, AttributeError) as error:
        raise _unavailable(f"the compiled library does not load: {error}") from error
    _prove(kernels)
    return kernels


def _unavailable(reason: str) -> KernelsUnavailable:
    return KernelsUnavailable(
        f"the compiled kernels of the embedded engine cannot be used: {reason}. Set generator.kernels to 'auto' or "
        "'torch' to serve without them, at half to two thirds of the speed"
    )


def _library(flags: tuple[str, ...]) -> Path:
    source = b"".join(source.read_bytes() for source in _SOURCES)
    key = hashlib.sha256(source + " ".join(flags).encode()).hexdigest()[:16]
    folder = cache_directory().parent / "kernels"
    path = folder / f"{key}.so"
    if not path.exists():
        _compile(path, flags=flags)
    return path


def _compile(path: Path, *, flags: tuple[str, ...]) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise _unavailable("no C compiler is installed (cc or gcc in PATH, or $CC)")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may come here at once: each builds in its own folder, the last rename wins.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        units, library = [f"{folder}/{source.stem}.o" for source in _SOURCES], Path(folder, "kernels.so")
        for command in (
            *([compiler, *flags, "-c", str(source), "-o", unit] for source, unit in zip(_SOURCES, units, strict=True)),
            [compiler, "-shared", *units, "-o", str(library)],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise _unavailable(f"{compiler} did not run: {error}") from error
            if done.returncode:
                raise _unavailable(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        library.replace(path)


def _prove(kernels: Kernels) -> None:
    """Compare with torch in double precision: whole and partial panels and tiles, one and several blocks."""
    numbers = torch.Generator().manual_seed(0)
    for m, outputs, inputs in ((1, 16, 8), (7, 33, 577), (13, 48, 1000)):
        rows = torch.randn(m, inputs, generator=numbers)
        weight = torch.randn(outputs, inputs, generator=numbers)
        packed = kernels.new_packed(outputs=outputs, inputs=inputs)
        kernels.pack(weight, packed)
        expected = rows.double() @ weight.double().T
        error = float((kernels.linear(rows, packed, outputs=outputs) - expected).abs().max()) / inputs**0.5
        if not error <= _PROOF_TOLERANCE:
            raise _unavailable(f"their product of [{m}, {inputs}] and [{inputs}, {outputs}] is off by {error:.1e}")
        whole = weight.mul(9.0).round().clamp(-126, 126)
        whole[:, ::INT8_GROUP] = 127.0  # so that factors are 1, and the integers are the numbers themselves
        narrow, factors = kernels.new_packed_int8(outputs=outputs, inputs=inputs)
        kernels.pack_int8(whole, narrow, factors)
        expected = rows.double() @ whole.double().T
        found = kernels.linear_int8(rows, narrow, factors, outputs=outputs)
        error = float((found - expected).abs().max()) / (127 * inputs**0.5)
        if not error <= _PROOF_TOLERANCE:
            raise _unavailable(f"their product with {outputs} columns of eight bits is off by {error:.1e}")
        if kernels.bfloat16:
            _prove_bfloat16(kernels, rows=rows.bfloat16(), weight=weight.bfloat16())
    _prove_attention(kernels, numbers=numbers)


def _prove_bfloat16(kernels: Kernels, *, rows: torch.Tensor, weight: torch.Tensor) -> None:
    outputs, inputs = weight.shape
    packed = kernels.new_packed_bfloat16(outputs=outputs, inputs=inputs)
    kernels.pack_bfloat16(weight, packed)
    expected = rows.double() @ weight.double().T
    error = float((kernels.linear_bfloat16(rows, packed, outputs=outputs) - expected).abs().max())
    if not error <= _BFLOAT16_TOLERANCE * float(expected.abs().max()):
        raise _unavailable(f"their product in bfloat16 with {outputs} columns is off by {error:.1e}")


def _prove_attention(kernels: Kernels, *, numbers: torch.Generator) -> None:
    rows, keys, values = (
        torch.randn(*shape, generator=numbers) for shape in ((2, 3, 24), (5, 1, 4, 24), (5, 1, 4, 24))
    )
    tables = torch.tensor([[3, 0, 4], [3, 2, 2]])
    attended = kernels.attend(rows, keys, values, tables=tables, counts=torch.tensor([9, 4]), scale=0.5)
    for row, count in enumerate((9, 4)):
        seen_keys, seen_values = (kv[tables[row], 0].reshape(-1, 24)[:count].double() for kv in (keys, values))
        weights = (0.5 * rows[row].double() @ seen_keys.T).softmax(-1)
        error = float((attended[row] - weights @ seen_values).abs().max())
        if not error <= _PROOF_TOLERANCE:
            raise _unavailable(f"their attention over {count} tokens is off by {error:.1e}")
