"""Low-rank adapters beside the base weights: each row of a pass gets the difference of its own adapter, or none.

The modules stay those of transformers. Behind the product of a linear layer, packed or plain, `x A B` is added to the
rows of each adapter in the pass: two small products for each adapter and layer, over just its rows. A and B are packed
like the base's weights, with the factor `alpha / rank` in B, and multiplied in float32 by the same kernels, so that a
row's bits depend on no other row. Decides nothing: which row belongs to whom is the scheduler's to say.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; batching by adapter as in
Chen et al., "Punica: Multi-Tenant LoRA Serving", arXiv 2310.18547.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from rollmill.errors import WeightError
from rollmill.generator.engines.embedded.linears import Buffers, Packing
from rollmill.types import Adapter
from rollmill.weights.adapters import pairs


class PlainPacking:
    """Weights as they are, multiplied by torch: where the compiled kernels are not used."""

    dtype = torch.float32

    def new(self, *, outputs: int, inputs: int) -> Buffers:
        """Return room for a weight."""
        return (torch.empty(outputs, inputs, dtype=torch.float32),)

    def pack(self, weight: torch.Tensor, into: Buffers, *, threads: int) -> None:
        """Write a weight."""
        into[0].copy_(weight)

    def product(self, rows: torch.Tensor, weight: Buffers, *, outputs: int) -> torch.Tensor:
        """Return the product."""
        return rows @ weight[0].T


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one layer, packed."""

    down: Buffers
    up: Buffers
    rank: int
    outputs: int

    def change(self, rows: torch.Tensor, *, packing: Packing) -> torch.Tensor:
        """Return float32 [m, outputs], what is added for `rows`, float32 [m, inputs]."""
        return packing.product(packing.product(rows, self.down, outputs=self.rank), self.up, outputs=self.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class ServedAdapter:
    """One version of an adapter, ready to be served.

    Attributes:
        name: under which requests ask for it.
        policy_version: publication number in its own repository.
        digest: of the publication.
        pairs: module -> its matrices.
        nbytes: of them.
        space: what sets KV under this version apart from all other KV.
    """

    name: str
    policy_version: int
    digest: str
    pairs: Mapping[str, Pair]
    nbytes: int
    space: bytes


RowGroups = tuple[tuple[ServedAdapter, torch.Tensor | slice], ...]
"""Adapter -> its packed tokens: a run of them, or int64 [rows]."""


@dataclass(slots=True)
class PassRows:
    """Which rows of the pass that runs belong to which adapter; empty between passes."""

    groups: RowGroups = ()


def groups_of(owners: Iterable[tuple[ServedAdapter | None, int]]) -> RowGroups:
    """Return whose the packed tokens of a pass are.

    Args:
        owners: runs of consecutive tokens, in their order: adapter (`None` for the base), how many.
    """
    runs: dict[ServedAdapter, list[np.ndarray]] = {}
    at = 0
    for adapter, count in owners:
        if adapter is not None:
            runs.setdefault(adapter, []).append(np.arange(at, at + count))
        at += count
    return tuple((adapter, _run_or_rows(np.concatenate(places))) for adapter, places in runs.items())


def _run_or_rows(rows: np.ndarray) -> torch.Tensor | slice:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else torch.from_numpy(rows)


class _AdaptedLinear:
    """Adds to the result of one linear layer.

    Args:
        module: its forward method is replaced.
        name: of the module in the model.
        rows: which rows belong to whom.
        packing: multiplies with the pairs.
    """

    def __init__(self, module: nn.Linear, *, name: str, rows: PassRows, packing: Packing) -> None:
        self.outputs, self.inputs = module.out_features, module.in_features
        self._name, self._rows, self._packing = name, rows, packing
        self._base: Callable[[torch.Tensor], torch.Tensor] = module.forward
        module.forward = self._forward

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        out = self._base(input)
        for adapter, rows in self._rows.groups:
            pair = adapter.pairs.get(self._name)
            if pair is not None:
                self._add(out.view(-1, self.outputs), input.reshape(-1, self.inputs), pair=pair, rows=rows)
        return out

    def _add(self, out: torch.Tensor, input: torch.Tensor, *, pair: Pair, rows: torch.Tensor | slice) -> None:
        own = input[rows].to(torch.float32).contiguous()
        change = pair.change(own, packing=self._packing).to(out.dtype)
        if isinstance(rows, slice):
            out[rows].add_(change)
        else:
            out.index_add_(0, rows, change)


@dataclass(slots=True)
class LowRank:
    """The linear layers of a model, made to add what adapters say.

    Args:
        model: its linear layers but the output head's are wrapped, whatever multiplies in them.
        packing: multiplies with the pairs.

    Attributes:
        rows: which rows of the pass belong to whom.
    """

    model: nn.Module
    packing: Packing
    rows: PassRows = field(default_factory=PassRows)
    _layers: dict[str, _AdaptedLinear] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rows of the output head are those whose logits are wanted, not those of the pass.
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        for name, module in self.model.named_modules():
            if type(module) is nn.Linear and module is not head:
                self._layers[name] = _AdaptedLinear(module, name=name, rows=self.rows, packing=self.packing)

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of an adapter of this rank on every layer, at most."""
        return 4 * rank * sum(layer.inputs + layer.outputs for layer in self._layers.values())

    def pack(
        self, tensors: Mapping[str, torch.Tensor], *, name: str, settings: Adapter, policy_version: int, digest: str
    ) -> ServedAdapter:
        """Return an adapter ready to be served; changes nothing that is served.

        Raises:
            WeightError: if a pair is not whole, or belongs to no linear layer of this model.
        """
        packed: dict[str, Pair] = {}
        for module, down, up in pairs(tensors, rank=settings.rank):
            layer = self._layers.get(module)
            if layer is None or (up.shape[0], down.shape[1]) != (layer.outputs, layer.inputs):
                have = "has no such linear layer" if layer is None else f"has {layer.outputs} x {layer.inputs} there"
                raise WeightError(
                    f"adapter {name!r} changes {module} by a matrix of {up.shape[0]} x {down.shape[1]}, and the model "
                    f"that is served {have}. It belongs to another model; nothing was changed"
                )
            packed[module] = Pair(
                down=self._packed(down), up=self._packed(up.float() * (settings.alpha / settings.rank)),
                rank=settings.rank, outputs=layer.outputs,
            )  # fmt: skip
        if not packed:
            raise WeightError(f"adapter {name!r} of policy version {policy_version} holds no pair of matrices")
        buffers = [buffer for pair in packed.values() for buffer in (*pair.down, *pair.up)]
        return ServedAdapter(
            name=name,
            policy_version=policy_version,
            digest=digest,
            pairs=packed,
            nbytes=sum(buffer.nbytes for buffer in buffers),
            space=space_of(name, policy_version=policy_version, digest=digest),
        )

    def _packed(self, weight: torch.Tensor) -> Buffers:
        outputs, inputs = weight.shape
        room = self.packing.new(outputs=outputs, inputs=inputs)
        self.packing.pack(weight.to(torch.float32).contiguous(), room, threads=1)
        return room


def space_of(name: str, *, policy_version: int, digest: str) -> bytes:
    """Return what sets the KV of one version of an adapter apart, 16 bytes."""
    return hashlib.blake2b(f"{policy_version} {digest} {name}".encode(), digest_size=16).digest()
