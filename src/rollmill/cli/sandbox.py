"""`rollmill sandbox`: run a command in a fresh sandbox, see and end those that live, ask what protects them here."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import click

from rollmill.cli.output import json_option, show
from rollmill.cli.sandbox_backends import backend_option, provider_of, settings_of
from rollmill.cli.sandbox_doctor import doctor_command
from rollmill.cli.sandbox_gvisor import build_runsc_command
from rollmill.cli.sandbox_images import images_command, prepare_command
from rollmill.cli.sandbox_serve import route_command, serve_command, show_command
from rollmill.errors import SandboxError
from rollmill.sandboxes import (
    DirectoryImage,
    ExecResult,
    HostImage,
    Lease,
    Limits,
    NamedImage,
    SandboxSpec,
)
from rollmill.sandboxes.disk_records import DiskRecord, DiskRecords, default_directory, is_alive
from rollmill.sandboxes.images import ImageStore, ImageStoreSettings
from rollmill.sandboxes.images.store import has_mounts
from rollmill.sandboxes.isolation import parse_level
from rollmill.sandboxes.sweep import kill_outright, sweep

_TIMED_OUT_STATUS = 124
_OUTPUT_BYTES = 16 * 1024**2
_MIB = 1024**2
_KILL_WAIT_S = 20.0
_LOOK_S = 0.05


@click.group("sandbox")
def sandbox_group() -> None:
    """Sandboxes of this machine: run a command, list and end them, and see what protects the host."""


sandbox_group.add_command(build_runsc_command)
sandbox_group.add_command(doctor_command)
sandbox_group.add_command(images_command)
sandbox_group.add_command(prepare_command)
sandbox_group.add_command(route_command)
sandbox_group.add_command(serve_command)
sandbox_group.add_command(show_command)


def _directory_option(command: Any) -> Any:
    text = "Where the records of sandboxes are; the user's runtime directory unless given."
    return click.option("--directory", type=click.Path(path_type=Path), default=None, help=text)(command)


@sandbox_group.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--memory-mib", type=click.IntRange(min=16), default=512, show_default=True, help="Memory, files included."
)
@click.option(
    "--disk-mib", type=click.IntRange(min=1), default=256, show_default=True, help="What it may write in all."
)
@click.option("--inodes", type=click.IntRange(min=512), default=20_000, show_default=True, help="Files it may make.")
@click.option(
    "--pids", type=click.IntRange(min=4), default=128, show_default=True, help="Processes and threads at once."
)
@click.option("--cpus", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Processor shares.")
@click.option(
    "--timeout-s", type=click.FloatRange(min=0.1), default=300.0, show_default=True, help="Then it is killed."
)
@click.option("--root", "roots", multiple=True, metavar="DIR", help="Root file system; several: the uppermost first.")
@click.option("--image", default=None, metavar="NAME", help="Root file system from the store: see `prepare`, `images`.")
@click.option("--store", type=click.Path(path_type=Path), default=None, help="Where images are kept.")
@click.option("--expose", multiple=True, metavar="PATH", help="File or directory of the host to show, read only.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Environment of the command.")
@click.option("--cwd", default=None, help="Directory to start in; root's home unless given.")
@click.option("--user", default=None, help="User inside, such as `user`; root unless given.")
@click.option(
    "--minimum-isolation", default="hardened", show_default=True, help="Refuse to run with less than this level."
)
@backend_option
@_directory_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@json_option
def run_command(command: tuple[str, ...], directory: Path | None, as_json: bool, **options: Any) -> None:
    """Run COMMAND in a fresh sandbox and end with its exit status; input that is piped in is passed on."""
    environment = dict(_name_and_value(one) for one in options["env"])
    settings = settings_of(
        options["backend"],
        directory=directory,
        minimum_isolation=parse_level(options["minimum_isolation"]),
        images=ImageStoreSettings(directory=options["store"]),
    )
    stdin = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    result = asyncio.run(_run(list(command), settings=settings, options=options, env=environment, stdin=stdin))
    if as_json:
        show(_document(result), text="", as_json=True)
    else:
        sys.stdout.buffer.write(result.stdout)
        sys.stdout.buffer.flush()
        sys.stderr.buffer.write(result.stderr)
        sys.stderr.buffer.flush()
        if result.truncated:
            click.echo(f"rollmill: output beyond {_OUTPUT_BYTES} bytes was dropped", err=True)
        if result.killed_by:
            click.echo(f"rollmill: killed: {result.killed_by}", err=True)
    status = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
    sys.exit(_TIMED_OUT_STATUS if result.timed_out else status)


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
    return name, value


def _spec(options: dict[str, Any]) -> SandboxSpec:
    limits = Limits(
        memory_bytes=options["memory_mib"] * _MIB,
        disk_bytes=options["disk_mib"] * _MIB,
        inodes=options["inodes"],
        pids=options["pids"],
        cpus=options["cpus"],
        wall_s=options["timeout_s"] + 60.0,
    )
    layers = tuple(os.path.abspath(one) for one in options["roots"])
    if layers and options["image"]:
        raise click.UsageError("give --image or --root, not both: each is a whole root file system")
    image = DirectoryImage(layers=layers) if layers else HostImage()
    if options["image"]:
        image = NamedImage(name=options["image"])
    return SandboxSpec(image=image, limits=limits, expose=tuple(os.path.abspath(one) for one in options["expose"]))


async def _run(
    command: list[str], *, settings: Any, options: dict[str, Any], env: dict[str, str], stdin: bytes
) -> ExecResult:
    spec = _spec(options)
    lease = Lease(owner="cli", ttl_s=spec.limits.wall_s)
    async with provider_of(settings) as provider:
        sandbox_id = f"run-{uuid.uuid4().hex[:12]}"
        sandbox = await provider.create(spec, id=sandbox_id, labels={"command": "run"}, lease=lease)
        return await sandbox.exec(
            command,
            cwd=options["cwd"],
            env=env,
            user=options["user"],
            timeout_s=options["timeout_s"],
            stdin=stdin,
            output_cap_bytes=_OUTPUT_BYTES,
        )


def _document(result: ExecResult) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout.decode("utf-8", "replace"),
        "stderr": result.stderr.decode("utf-8", "replace"),
        "killed_by": result.killed_by,
        "truncated": result.truncated,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "memory_bytes": result.memory_bytes,
    }


@sandbox_group.command("list")
@_directory_option
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
    running = record.first_process is not None and is_alive(record.first_process)
    state = "orphan" if not is_alive(record.owner) else "running" if running else "starting"
    return {
        "id": record.sandbox_id,
        "state": state,
        "backend": record.backend,
        "owner_pid": record.owner.pid,
        "age_s": max(0.0, time.time() - record.created_wall_s),
        "labels": record.labels,
    }


@sandbox_group.command("kill")
@click.option("--orphans", is_flag=True, help="Remove everything whose owner has ended.")
@click.option("--store", type=click.Path(path_type=Path), default=None, help="Where images are kept.")
@click.argument("ids", nargs=-1)
@_directory_option
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
