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
from rollmill.weights.files import fsync_directory

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


def history_of(number: int) -> str:
    """Return the history that an incarnation writes."""
    return f"h{number:03d}"


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


class Evaluating(msgspec.Struct, frozen=True, kw_only=True):
    """The version that an evaluation asks for, while it does: a replica that starts meanwhile serves it, if it can."""

    policy_version: int


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run, from spawn to exit (or to now).

    Attributes:
        life: names it among the lives of its process, see `rollmill.runtime.losses.life_of`.
        incarnation: of the run when it was spawned.
        spawned_at_s: clock of the machine.
    """

    process: str
    life: str
    incarnation: int
    spawned_at_s: float
    wall_s: float


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What one supervisor measured; rewritten every few seconds, so that a kill loses little.

    Attributes:
        number: incarnation that it began with.
        lives: of every process that it started.
        peak_memory_bytes: largest sum of PSS over all processes of the run.
    """

    number: int
    started_wall_s: float
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    lives: tuple[Life, ...]
    ended: str = "running"


class ProcessSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of one process went, from spawn to the close of its books.

    Attributes:
        closed: `False` while the process lives: its book up to now, in case it is killed.
    """

    process: str
    incarnation: int
    spawned_at_s: float
    closed_at_s: float
    seconds: dict[str, float]
    closed: bool = True


def write_record(path: Path, record: Any, *, durable: bool = False) -> None:
    """Write a record as readable JSON, atomically.

    Args:
        durable: it must survive a power cut too, not only a kill.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=2))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)
    if durable:
        fsync_directory(path.parent)


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
