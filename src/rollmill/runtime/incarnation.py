"""One start of a run: what its processes agree on before they begin.

A run may be stopped and resumed; each start is an incarnation with its own history. The supervisor writes the record,
all processes read it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollmill.errors import RunDirectoryError

T = TypeVar("T")


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """What this start of the run begins from.

    Attributes:
        number: 1 for a new run, rising with every resume.
        history_id: stamped on every version and step of this incarnation.
        optimizer_step: updates in the weights it starts from.
        checkpoint: directory it starts from; `None` starts from the model itself.
        trained_group_ids: groups of the surviving history.
        abandoned_versions: policy versions published after the commit point.
        parent_version: version the checkpoint's weights were published as, if any.
        repairs: what was damaged or lost and what was used instead, in words, over all starts of the run.
    """

    number: int
    history_id: str
    optimizer_step: int = 0
    checkpoint: str | None = None
    trained_group_ids: tuple[str, ...] = ()
    abandoned_versions: tuple[int, ...] = ()
    parent_version: int | None = None
    repairs: tuple[str, ...] = ()


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller found out before trainer and generator start.

    Attributes:
        model_path: prepared Hugging Face directory.
        data_identity: digest of the data set; compared on resume.
    """

    model_path: str
    data_identity: str
    training_size: int
    heldout_size: int
    longest_prompt_tokens: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor measured of one incarnation; rewritten every few seconds, so that a kill loses little.

    Attributes:
        process_wall_s: process -> seconds from spawn to exit (or to now).
        peak_memory_bytes: largest sum of PSS over all processes of the run.
    """

    number: int
    started_wall_s: float
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    process_wall_s: dict[str, float]
    ended: str = "running"


class ProcessSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of one process went, from spawn to the close of its books."""

    process: str
    incarnation: int
    spawned_at_s: float
    closed_at_s: float
    seconds: dict[str, float]


def write_record(path: Path, record: Any) -> None:
    """Write a record as readable JSON, atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    os.replace(partial, path)


def read_record(path: Path, kind: type[T]) -> T:
    """Return a record of the run directory.

    Raises:
        RunDirectoryError: if the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} is missing. The run did not get that far, or the directory is not a run directory."
        ) from None
    except msgspec.DecodeError as error:
        raise RunDirectoryError(f"{path} is damaged ({error}). Start a new run under another run.name.") from error
