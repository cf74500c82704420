"""Checkpoints of the trainer: written whole or not at all, verified when read.

A checkpoint is a folder `step-000020` that `transformers` (and `rollmill eval`) can load as a model, with the
optimizer's state and `checkpoint.json` beside it. The rename of the folder is the commit point of the run: before it
the step never happened, after it everything `checkpoint.json` lists is trained. Decides which old ones go and which
is the newest that can be trusted. A folder of a later step than the one that a run goes on from belongs to no history
any more; it is set aside under another name, so that it can never win later. torch is imported only where tensors are
written or loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollmill.errors import CheckpointError, WeightError
from rollmill.types import TensorEntry
from rollmill.weights.files import (
    PARTIAL_SUFFIX,
    fsync_directory,
    fsync_file,
    read_sealed_json,
    sha256_of_file,
    write_sealed_json,
    writing,
)
from rollmill.weights.tensorfile import load_tensors, verify_file, whole_digest, write_tensors

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "checkpoint.json"
SET_ASIDE = "set-aside"
_NAME = re.compile(r"step-(\d{6,})")


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`."""

    format_version: int
    optimizer_step: int
    commit: dict[str, Any]
    trainer_state: dict[str, Any]
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]
    files: dict[str, str]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose digests were verified.

    Attributes:
        path: the folder; a loadable Hugging Face model directory.
        commit: the commit point as the trainer gave it.
        trainer_state: what else the trainer gave, as JSON.
        model_digest: sha256 of the whole model, as in a weight manifest.
        skipped: why newer checkpoints were passed over, in words.
    """

    path: Path
    optimizer_step: int
    commit: dict[str, Any]
    trainer_state: dict[str, Any]
    model_digest: str
    skipped: tuple[str, ...] = ()

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors, memory-mapped."""
        return load_tensors(self.path / MODEL_FILE)

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors, memory-mapped."""
        path = self.path / OPTIMIZER_FILE
        return load_tensors(path) if path.exists() else {}


def write_checkpoint(
    root: str | Path,
    *,
    optimizer_step: int,
    model_tensors: Mapping[str, torch.Tensor],
    optimizer_tensors: Mapping[str, torch.Tensor],
    commit: Mapping[str, Any],
    trainer_state: Mapping[str, Any],
    extra_files: Iterable[str | Path] = (),
    keep: int = 2,
) -> Path:
    """Write a checkpoint durably, then remove the oldest beyond `keep`.

    Only folders up to this step count for `keep`: what was just written is the newest that is known to be good.

    Args:
        root: folder of the run's checkpoints.
        model_tensors: distinct parameters by their Hugging Face names.
        optimizer_tensors: flat state of the optimizer; may be empty.
        commit: the commit point, as JSON values.
        trainer_state: everything else that a resume needs, as JSON values.
        extra_files: files copied beside the model (see `model_files`).
        keep: newest checkpoints kept, this one included.

    Returns:
        The folder of the new checkpoint.

    Raises:
        WeightError: if the space is full or tensors share memory; older checkpoints stay as they are.
    """
    root = Path(root)
    path = root / f"step-{optimizer_step:06d}"
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    record = _Record(
        format_version=FORMAT_VERSION,
        optimizer_step=optimizer_step,
        commit=dict(commit),
        trainer_state=dict(trainer_state),
        model={},
        optimizer={},
        files={},
    )
    with writing(f"checkpoint {path.name}", into=root, kept="The checkpoints before it are whole."):
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        partial.mkdir()
        try:
            _fill(partial, record, model=model_tensors, optimizer=optimizer_tensors, extra_files=extra_files)
            _replace(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        set_aside_newer(root, than=optimizer_step)
        for old in _found(root)[: -max(keep, 1)]:
            shutil.rmtree(old)
    return path


def _fill(
    partial: Path,
    record: _Record,
    *,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    extra_files: Iterable[str | Path],
) -> None:
    """Write all files of a checkpoint; the record, with the digests of the others, last."""
    record = msgspec.structs.replace(
        record,
        model=write_tensors(partial / MODEL_FILE, model, durable=True),
        optimizer=write_tensors(partial / OPTIMIZER_FILE, optimizer, durable=True) if optimizer else {},
        files=_copy_files(extra_files, partial),
    )
    write_sealed_json(partial / RECORD_FILE, msgspec.to_builtins(record))
    fsync_directory(partial)


def set_aside_newer(root: str | Path, *, than: int | None) -> tuple[Path, ...]:
    """Rename the checkpoints of later steps, so that no later start takes them; return the new folders.

    A run that goes on from an older checkpoint makes those steps again. The folders of the abandoned history stay for
    a person to look at, or to put back before the run has gone on.

    Args:
        root: folder of the run's checkpoints.
        than: optimizer step that the run goes on from; `None` sets all aside.
    """
    moved: list[Path] = []
    for path in list_checkpoints(root):
        if than is None or _step_of(path) > than:
            target = _free_name(path)
            os.rename(path, target)
            moved.append(target)
    if moved:
        fsync_directory(Path(root))
    return tuple(moved)


def _free_name(path: Path) -> Path:
    target = path.with_name(f"{path.name}.{SET_ASIDE}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{SET_ASIDE}-{number}")
    return target


def model_files(model_directory: str | Path) -> tuple[Path, ...]:
    """Return what `write_checkpoint` must copy for the checkpoint to load: configuration, tokenizer, chat template."""
    weights = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")
    ours = (RECORD_FILE, "rollmill.json")
    return tuple(
        path
        for path in sorted(Path(model_directory).iterdir())
        if path.is_file() and not path.name.endswith(weights) and path.name not in ours
    )


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return a checkpoint after checking every digest. Needs no torch.

    Raises:
        CheckpointError: if it is missing or damaged, naming the file.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}. Name a folder like {path.parent}/step-000020.")
    try:
        record = _read_record(path)
        verify_file(path / MODEL_FILE, record.model, what=path.name)
        if record.optimizer:
            verify_file(path / OPTIMIZER_FILE, record.optimizer, what=path.name)
        _check_files(path, record.files)
    except (WeightError, OSError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error} Resume from an older checkpoint.") from error
    return Checkpoint(
        path=path,
        optimizer_step=record.optimizer_step,
        commit=record.commit,
        trainer_state=record.trainer_state,
        model_digest=whole_digest(record.model),
    )


def latest_checkpoint(root: str | Path) -> Checkpoint:
    """Return the newest checkpoint that verifies; its `skipped` says which damaged ones were passed over.

    Raises:
        CheckpointError: if there is none.
    """
    root = Path(root)
    skipped: list[str] = []
    for path in reversed(_found(root) if root.is_dir() else []):
        try:
            return msgspec.structs.replace(read_checkpoint(path), skipped=tuple(skipped))
        except CheckpointError as error:
            skipped.append(f"{path.name} was skipped: {error}")
    reasons = " ".join(skipped) if skipped else "No step was saved before the run ended."
    raise CheckpointError(
        f"there is no usable checkpoint in {root}. {reasons} Restore one from a copy; or move these folders away and "
        "resume: the run then begins at step 0 with the samples that it has. Or start a new run."
    )


def list_checkpoints(root: str | Path) -> Sequence[Path]:
    """Return the folders of all checkpoints, oldest first, without verifying them."""
    return _found(Path(root)) if Path(root).is_dir() else []


def _found(root: Path) -> list[Path]:
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path)


def _copy_files(sources: Iterable[str | Path], target: Path) -> dict[str, str]:
    digests: dict[str, str] = {}
    for source in map(Path, sources):
        copy = target / source.name
        if copy.exists():
            raise WeightError(
                f"two files named {source.name} would go into the checkpoint. Give each extra file a name of its own."
            )
        shutil.copyfile(source, copy)
        fsync_file(copy)
        digests[source.name] = sha256_of_file(copy)
    return digests


def _replace(partial: Path, path: Path) -> None:
    """Rename a complete folder into place; one of an abandoned history that has the name makes room first."""
    if path.exists():
        old = path.with_name(f"{path.name}.replaced{PARTIAL_SUFFIX}")
        os.rename(path, old)
        os.rename(partial, path)
        fsync_directory(path.parent)
        shutil.rmtree(old)
    else:
        os.rename(partial, path)
        fsync_directory(path.parent)


def _read_record(path: Path) -> _Record:
    content = read_sealed_json(path / RECORD_FILE)
    if content.get("format_version") != FORMAT_VERSION:
        raise WeightError(
            f"{path / RECORD_FILE} has format version {content.get('format_version')}, this Rollmill reads "
            f"{FORMAT_VERSION}."
        )
    try:
        return msgspec.convert(content, _Record)
    except msgspec.ValidationError as error:
        raise WeightError(f"{path / RECORD_FILE} is not a checkpoint record: {error}.") from error


def _check_files(path: Path, digests: Mapping[str, str]) -> None:
    for name, said in digests.items():
        found = sha256_of_file(path / name)
        if found != said:
            raise WeightError(f"{path / name} has sha256 {found}, written was {said}.")
