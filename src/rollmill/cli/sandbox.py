"""`rollmill sandbox`: the group of its commands, and `run`: a command in a fresh sandbox."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import click

from rollmill.cli.output import json_option, show
from rollmill.cli.sandbox_backends import provider_of, settings_of
from rollmill.cli.sandbox_doctor import doctor_command
from rollmill.cli.sandbox_gvisor import build_runsc_command
from rollmill.cli.sandbox_images import images_command, prepare_command
from rollmill.cli.sandbox_options import backend_option, directory_option, isolation_option, store_option
from rollmill.cli.sandbox_records import kill_command, list_command, show_command
from rollmill.cli.sandbox_serve import route_command, serve_command
from rollmill.sandboxes import (
    DirectoryImage,
    ExecResult,
    HostImage,
    Lease,
    Limits,
    NamedImage,
    SandboxSpec,
)
from rollmill.sandboxes.images import ImageStoreSettings
from rollmill.sandboxes.isolation import parse_level

_TIMED_OUT_STATUS = 124
_OUTPUT_BYTES = 16 * 1024**2
_MIB = 1024**2


@click.group("sandbox")
def sandbox_group() -> None:
    """Sandboxes of this machine: run a command, list and end them, and see what protects the host."""


sandbox_group.add_command(build_runsc_command)
sandbox_group.add_command(doctor_command)
sandbox_group.add_command(images_command)
sandbox_group.add_command(kill_command)
sandbox_group.add_command(list_command)
sandbox_group.add_command(prepare_command)
sandbox_group.add_command(route_command)
sandbox_group.add_command(serve_command)
sandbox_group.add_command(show_command)


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
@store_option
@click.option("--expose", multiple=True, metavar="PATH", help="File or directory of the host to show, read only.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Environment of the command.")
@click.option("--cwd", default=None, help="Directory to start in; root's home unless given.")
@click.option("--user", default=None, help="User inside, such as `user`; root unless given.")
@isolation_option
@backend_option
@directory_option
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
