"""Weights: the model repository, checkpoints, and models by name. Importing it loads no torch."""

from rollmill.weights.catalog import CatalogEntry, catalog
from rollmill.weights.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_checkpoints,
    model_files,
    read_checkpoint,
    set_aside_newer,
    write_checkpoint,
)
from rollmill.weights.inspection import ModelFacts, inspect
from rollmill.weights.prepare import PreparedModel, find_prepared, prepare
from rollmill.weights.protocol import ModelRepository, Publication
from rollmill.weights.repository import Adoption, LocalModelRepository
from rollmill.weights.transport import resolve_transport, sweep_shared_memory

__all__ = [
    "Adoption",
    "CatalogEntry",
    "Checkpoint",
    "LocalModelRepository",
    "ModelFacts",
    "ModelRepository",
    "PreparedModel",
    "Publication",
    "catalog",
    "find_prepared",
    "inspect",
    "latest_checkpoint",
    "list_checkpoints",
    "model_files",
    "prepare",
    "read_checkpoint",
    "resolve_transport",
    "set_aside_newer",
    "sweep_shared_memory",
    "write_checkpoint",
]
