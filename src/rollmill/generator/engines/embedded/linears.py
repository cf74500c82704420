"""Linear layers over weights that are packed once per load, instead of at every product.

The modules stay those of transformers: only the product inside `torch.nn.Linear` is replaced. Their plain weights are
not kept, except where another module reads them too (a tied embedding). In bfloat16 the inputs, the weights and the
result are rounded as torch rounds them, and sums are float32. Where the CPU has no bfloat16 product the rounded numbers
are kept and multiplied in float32: emulating one is six times slower. With int8 weights are integers with a factor per
32 inputs, rounded when they are packed; inputs, sums and results stay as they are.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol, TypeVar

import torch
from torch import nn

from rollmill.generator.engines.embedded.native import Kernels, KernelsUnavailable, load_kernels

KernelChoice = Literal["auto", "native", "torch"]
Buffers = tuple[torch.Tensor, ...]
T = TypeVar("T")

_log = logging.getLogger(__name__)


def choose_kernels(choice: KernelChoice) -> Kernels | None:
    """Return the compiled kernels, or `None` if torch computes everything.

    Args:
        choice: `native` insists, `auto` takes them where they can be used, `torch` never.

    Raises:
        KernelsUnavailable: if insisted on and not usable.
    """
    if choice == "torch":
        return None
    try:
        return load_kernels()
    except KernelsUnavailable as error:
        if choice == "native":
            raise
        _log.warning("%s", error)
        return None


class Packing(Protocol):
    """How the weight of a product is kept."""

    dtype: torch.dtype
    """Of the weights that are given, of the rows and of the results."""

    def new(self, *, outputs: int, inputs: int) -> Buffers:
        """Return room for a weight."""
        ...

    def pack(self, weight: torch.Tensor, into: Buffers, *, threads: int) -> None:
        """Write a weight, [outputs, inputs]."""
        ...

    def product(self, rows: torch.Tensor, weight: Buffers, *, outputs: int) -> torch.Tensor:
        """Return [..., outputs] for [..., inputs], contiguous."""
        ...


class Float32Packing:
    """The numbers themselves, re-ordered."""

    dtype = torch.float32

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def new(self, *, outputs: int, inputs: int) -> Buffers:
        """Return room for a weight."""
        return (self._kernels.new_packed(outputs=outputs, inputs=inputs),)

    def pack(self, weight: torch.Tensor, into: Buffers, *, threads: int) -> None:
        """Write a weight."""
        self._kernels.pack(weight, into[0], threads=threads)

    def product(self, rows: torch.Tensor, weight: Buffers, *, outputs: int) -> torch.Tensor:
        """Return the product."""
        return self._kernels.linear(rows, weight[0], outputs=outputs)


class Bfloat16Packing:
    """The numbers themselves, two side by side: half the memory, and of what a small batch reads."""

    dtype = torch.bfloat16

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def new(self, *, outputs: int, inputs: int) -> Buffers:
        """Return room for a weight."""
        return (self._kernels.new_packed_bfloat16(outputs=outputs, inputs=inputs),)

    def pack(self, weight: torch.Tensor, into: Buffers, *, threads: int) -> None:
        """Write a weight."""
        self._kernels.pack_bfloat16(weight, into[0], threads=threads)

    def product(self, rows: torch.Tensor, weight: Buffers, *, outputs: int) -> torch.Tensor:
        """Return the product."""
        return self._kernels.linear_bfloat16(rows, weight[0], outputs=outputs)


class Int8Packing:
    """Integers of eight bits and a factor per 32 inputs: 0.28 of the memory, and of what a small batch reads."""

    dtype = torch.float32

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def new(self, *, outputs: int, inputs: int) -> Buffers:
        """Return room for a weight."""
        return self._kernels.new_packed_int8(outputs=outputs, inputs=inputs)

    def pack(self, weight: torch.Tensor, into: Buffers, *, threads: int) -> None:
        """Round and write a weight."""
        self._kernels.pack_int8(weight, into[0], into[1], threads=threads)

    def product(self, rows: torch.Tensor, weight: Buffers, *, outputs: int) -> torch.Tensor:
        """Return the product with the rounded weight."""
        return self._kernels.linear_int8(rows, weight[0], weight[1], outputs=outputs)


class PackedLinear:
    """The product of one linear layer.

    Args:
        module: its forward method is replaced.
        packing: how its weight is kept.
        keeps_weight: whether the plain weight stays beside the packed one.
    """

    def __init__(self, module: nn.Linear, *, packing: Packing, keeps_weight: bool) -> None:
        self.shape = module.weight.shape
        self._packing, self._bias, self._dtype = packing, module.bias, module.weight.dtype
        self._outputs, self._inputs = module.out_features, module.in_features
        self._packed = packing.new(outputs=self._outputs, inputs=self._inputs)
        self._spare: Buffers | None = None
        if not keeps_weight:
            # The right shape without memory; whoever reads it gets NaN, never numbers of an earlier version.
            nothing = torch.full((), torch.nan, dtype=module.weight.dtype).expand(self.shape)
            module.weight = nn.Parameter(nothing, requires_grad=False)
        module.forward = self._forward

    def write(self, value: torch.Tensor) -> None:
        """Pack a new weight, [outputs, inputs] of any floating dtype, rounded to the serving precision."""
        self._pack(value, into=self._packed, threads=torch.get_num_threads())

    def stage(self, value: torch.Tensor) -> None:
        """Pack a new weight into the spare buffer, on one thread; products go on with the old one."""
        if self._spare is None:
            self._spare = self._packing.new(outputs=self._outputs, inputs=self._inputs)
        self._pack(value, into=self._spare, threads=1)

    def swap(self) -> None:
        """Exchange the spare buffer and the one that products read."""
        self._packed, self._spare = _exchanged(self._packed, self._spare)

    @property
    def nbytes(self) -> int:
        """Bytes of what products read."""
        return sum(buffer.nbytes for buffer in self._packed)

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers that products read, and the spare ones if there are any."""
        return [*self._packed, *(self._spare or ())]

    def _pack(self, value: torch.Tensor, *, into: Buffers, threads: int) -> None:
        # Each operator, also one that changes nothing, lets go of the interpreter, and decoding waits at the next turn.
        for dtype in (self._dtype, self._packing.dtype):
            if value.dtype is not dtype:
                value = value.to(dtype)
        self._packing.pack(value.contiguous(), into, threads=threads)

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        wanted = self._packing.dtype
        # Questions cost less than operators that change nothing, and there are seven of these products in a layer.
        rows = (input if input.dtype is wanted else input.to(wanted)).contiguous()
        out = self._packing.product(rows, self._packed, outputs=self._outputs)
        if wanted is not self._dtype:
            out = out.to(self._dtype)
        if self._bias is not None:
            out += self._bias
        return out


class Destination:
    """Where a published tensor goes: a plain parameter, a packed product, or both.

    Args:
        parameter: copied into, or `None`.
        packed: packed into.
    """

    def __init__(self, parameter: torch.Tensor | None, *packed: PackedLinear) -> None:
        self.parameter, self._packed = parameter, packed
        self.shape = packed[0].shape if parameter is None else parameter.shape
        # The memory behind the parameter, which the modules go on holding while this is exchanged.
        self._plain = None if parameter is None else parameter.detach()
        self._spare: torch.Tensor | None = None

    def write(self, value: torch.Tensor) -> None:
        """Take a new value, cast to what it is kept in."""
        if self._plain is not None:
            self._plain.copy_(value)
        for packed in self._packed:
            packed.write(value)

    def stage(self, value: torch.Tensor) -> None:
        """Put a new value into spare buffers, cast as by `write`; what is served does not change."""
        if self._plain is not None:
            if self._spare is None:
                self._spare = torch.empty_like(self._plain)
            self._spare.copy_(value)
        for packed in self._packed:
            packed.stage(value)

    def swap(self) -> None:
        """Exchange the spare buffers, written by `stage`, and those that are served."""
        if self.parameter is not None and self._plain is not None:
            self._plain, self._spare = _exchanged(self._plain, self._spare)
            self.parameter.data = self._plain
        for packed in self._packed:
            packed.swap()

    @property
    def nbytes(self) -> int:
        """Bytes of the serving buffers."""
        plain = 0 if self._plain is None else self._plain.nbytes
        return plain + sum(packed.nbytes for packed in self._packed)

    def buffers(self) -> list[torch.Tensor]:
        """Return every buffer that holds this tensor, serving or spare."""
        plain = [buffer for buffer in (self._plain, self._spare) if buffer is not None]
        return plain + [buffer for packed in self._packed for buffer in packed.buffers()]


def _exchanged(serving: T, spare: T | None) -> tuple[T, T]:
    if spare is None:
        raise AssertionError("nothing was staged, so there is nothing to exchange")
    return spare, serving


def destinations(model: nn.Module, *, packing: Packing | None) -> list[tuple[tuple[str, ...], Destination]]:
    """Return all names of each distinct parameter (a tied head has two) with its destination.

    With a packing, every linear layer of the model is made to use it.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    layers: dict[int, list[nn.Linear]] = {key: [] for key in parameters}
    if packing is not None:
        for module in model.modules():
            if type(module) is nn.Linear:
                layers[id(module.weight)].append(module)
    found = []
    for key, parameter in parameters.items():
        packed = []
        others = len(names[key]) > len(layers[key])
        if packing is not None:
            packed = [PackedLinear(layer, packing=packing, keeps_weight=others) for layer in layers[key]]
        found.append((tuple(names[key]), Destination(parameter if others or not packed else None, *packed)))
    return found
