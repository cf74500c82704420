"""`rollmill sandbox list`, `show` and `kill`: sandboxes of this user, of whatever process, by their records on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from rollmill.cli.output import json_option, show
from rollmill.cli.sandbox_options import directory_option, store_option
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes.disk_records import DiskRecord, DiskRecords, default_directory, is_alive
from rollmill.sandboxes.images import ImageStore, ImageStoreSettings
from rollmill.sandboxes.images.store import has_mounts
from rollmill.sandboxes.sweep import kill_outright, sweep

_KILL_WAIT_S = 20.0
_LOOK_S = 0.05


@click.command("list")
@directory_option
@json_option
def list_command(directory: Path | None, as_json: bool) -> None:
    """List this user's sandboxes, of whatever process; orphans are those whose owner has ended."""
    records = DiskRecords(directory or default_directory()).read_all()
    rows = [_row(one) for one in records]
    lines = [f"{'ID':<24} {'STATE':<9} {'OWNER':>8} {'AGE':>8}  LABELS"]
    for row in rows:
        labels = " ".join(f"{name}={value}" for name, value in row["labels"].items())
        lines.append(f"{row['id']:<24} {row['state']:<9} {row['owner_pid']:>8} {row['age_s']:>7.0f}s  {labels}")
    show(rows, text="\n".join(lines) if rows else "no sandboxes", as_json=as_json)


def _row(record: DiskRecord) -> dict[str, Any]:
    """Return what is told of every sandbox."""
    runs = record.first_process is not None and is_alive(record.first_process)
    return {
        "id": record.sandbox_id,
        "state": "orphan" if not is_alive(record.owner) else "running" if runs else "starting",
        "backend": record.backend,
        "age_s": round(max(0.0, time.time() - record.created_wall_s), 3),
        "owner_pid": record.owner.pid,
        "labels": record.labels,
    }


@click.command("show")
@click.argument("sandbox_id", metavar="ID")
@directory_option
@json_option
def show_command(sandbox_id: str, directory: Path | None, as_json: bool) -> None:
    """Show all that is known of one sandbox of this user, of whatever process."""
    from rollmill.sandboxes.guest.cgroups import Groups

    record = DiskRecords(directory or default_directory()).read(sandbox_id)
    if record is None:
        raise SandboxDead(
            f"no sandbox {sandbox_id} is here: it has ended, or is another user's. `rollmill sandbox list` shows all",
            reason="provider_lost",
            fault="infrastructure",
        )
    document = {
        **_row(record),
        "first_process_pid": None if record.first_process is None else record.first_process.pid,
        "groups": [path for _, path in record.groups],
        "usage": Groups(record.groups).usage(),
    }
    show(document, text=_words(document), as_json=as_json)


def _words(document: dict[str, Any]) -> str:
    lines = [f"{name:<18} {document[name]}" for name in ("id", "state", "backend", "age_s", "owner_pid")]
    lines.append(f"{'first_process_pid':<18} {document['first_process_pid'] or '-'}")
    lines += [f"{'label':<18} {name}={value}" for name, value in document["labels"].items()]
    lines += [f"{'usage':<18} {name}={value}" for name, value in document["usage"].items()]
    return "\n".join([*lines, *(f"{'group':<18} {path}" for path in document["groups"])])


@click.command("kill")
@click.option("--orphans", is_flag=True, help="Remove everything whose owner has ended.")
@store_option
@click.argument("ids", nargs=-1)
@directory_option
@json_option
def kill_command(
    ids: tuple[str, ...], orphans: bool, store: Path | None, directory: Path | None, as_json: bool
) -> None:
    """End sandboxes by id, also those of other processes, and wait until nothing of them is left."""
    if not ids and not orphans:
        raise click.UsageError("name sandboxes to end (`rollmill sandbox list` shows them), or give --orphans")
    records = DiskRecords(directory or default_directory())
    left = [one for one in ids if not _kill(records, one)]
    swept = sweep(records) if orphans else None
    if orphans and has_mounts(images := ImageStoreSettings(directory=store)):
        ImageStore(images)  # opening it unmounts what nobody holds
    removed = [*(one for one in ids if one not in left), *(swept.removed if swept else ())]
    left += swept.left if swept else ()
    text = (
        "\n".join([*(f"ended {one}" for one in removed), *(f"still there: {one}" for one in left)]) or "nothing to end"
    )
    show({"removed": removed, "left": left}, text=text, as_json=as_json)
    if left:
        raise SandboxError(f"{', '.join(left)} did not end within {_KILL_WAIT_S:g} s; list the sandboxes and try again")


def _kill(records: DiskRecords, sandbox_id: str) -> bool:
    """End one; its owner, if it lives, notices and tidies up."""
    record = records.read(sandbox_id)
    if record is None:
        return True  # unknown counts as ended
    if not is_alive(record.owner):
        return sandbox_id not in sweep(records).left
    records.note_kill(sandbox_id)
    kill_outright(record)
    deadline = time.monotonic() + _KILL_WAIT_S
    while records.read(sandbox_id) is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True
