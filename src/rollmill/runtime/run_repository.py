"""The model repository of a run, as its trainer and its replicas open it: one publishes what the others read."""

from __future__ import annotations

from rollmill.config.engines import published_rounding
from rollmill.config.schema import RollmillConfig
from rollmill.runtime.layout import ProcessLayout
from rollmill.weights.repository import LocalModelRepository


def repository_of_run(config: RollmillConfig, layout: ProcessLayout) -> LocalModelRepository:
    """Return the repository in a run directory, made if missing.

    Raises:
        RunDirectoryError: if it cannot be made.
    """
    return LocalModelRepository(
        layout.weights,
        transport=config.weights.transport,
        keep_versions=config.weights.keep_versions,
        quantization=published_rounding(config.generator),
    )
