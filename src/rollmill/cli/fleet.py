"""`rollmill fleet`: look at a served generator, have it load weights, drain it: a replica, or many behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from rollmill.cli.output import json_option, show

if TYPE_CHECKING:
    from rollmill.generator.client import GeneratorClient
    from rollmill.generator.wire import LoadReport, ReplicaStatus

R = TypeVar("R")


@click.group("fleet")
def fleet_group() -> None:
    """Look at a served generator, have it load weights, drain it: one replica, or many behind a router."""


def caller_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what the fleet is shown."""
    path = click.Path(path_type=Path)
    options = (
        click.argument("address", metavar="HOST:PORT"),
        click.option("--token-file", default=None, type=click.Path(), help="File with the token that it asks for."),
        click.option("--tls-ca", default=None, type=path, help="Authority of its certificate, PEM; calls with TLS."),
        click.option("--tls-cert", default=None, type=path, help="The caller's own certificate for mTLS, PEM."),
        click.option("--tls-key", default=None, type=path, help="Its private key, PEM."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@fleet_group.command("status")
@caller_options
@json_option
def status_command(as_json: bool, **caller: Any) -> None:
    """Say what is served, by whom, and how busy they are."""
    status = _ask(caller, lambda client: client.status())
    show(msgspec.to_builtins(status), text=_status_text(status), as_json=as_json)


@fleet_group.command("load")
@caller_options
@click.argument("policy_version", type=click.IntRange(min=0))
@click.option("--job", default="", help="Of a router whose replicas serve different jobs: whose weights these are.")
@click.option("--adapter", default="", help="Load a version of this adapter; 0 takes its newest.")
@click.option(
    "--deadline-s", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="Longest wait."
)
@json_option
def load_command(policy_version: int, job: str, adapter: str, deadline_s: float, as_json: bool, **caller: Any) -> None:
    """Have a published version loaded, on many replicas a few at a time."""
    report = _ask(
        caller, lambda client: client.load_weights(policy_version, deadline_s=deadline_s, adapter=adapter, job=job)
    )
    show(msgspec.to_builtins(report), text=_report_text(report), as_json=as_json)


@fleet_group.command("drain")
@caller_options
@click.option(
    "--deadline-s", default=30.0, show_default=True, type=click.FloatRange(min=0), help="Time for what runs to finish."
)
@json_option
def drain_command(deadline_s: float, as_json: bool, **caller: Any) -> None:
    """Let it finish what runs and take nothing new."""
    unfinished = _ask(caller, lambda client: client.drain(deadline_s))
    show({"unfinished": unfinished}, text=f"drained; {unfinished} requests were cut off", as_json=as_json)


def _ask(caller: dict[str, Any], what: Callable[[GeneratorClient], Awaitable[R]]) -> R:
    from rollmill.generator.client import GeneratorClient
    from rollmill.generator.security import TlsFiles, read_token

    files = (caller["tls_cert"], caller["tls_key"], caller["tls_ca"])
    token = None if caller["token_file"] is None else read_token(caller["token_file"])
    tls = None if files == (None, None, None) else TlsFiles(cert=files[0], key=files[1], ca=files[2])

    async def asked() -> R:
        client = GeneratorClient(caller["address"], token=token, tls=tls)
        try:
            return await what(client)
        finally:
            await client.close()

    return asyncio.run(asked())


def _status_text(status: ReplicaStatus) -> str:
    use = status.kv_used_tokens / status.kv_capacity_tokens if status.kv_capacity_tokens else 0.0
    lines = [
        f"{status.state.value}{': ' + status.reason if status.reason else ''}",
        f"policy version {status.policy_version}, digest {status.digest[:12]}, {status.dtype}",
        f"{status.running} running and {status.waiting} waiting for {status.max_num_seqs} places; KV {use:.0%} used",
    ]
    lines += [f"adapter {one.name}: policy version {one.policy_version}" for one in status.adapters]
    for one in status.members:
        jobs = f", jobs {', '.join(one.jobs)}" if one.jobs else ""
        why = f": {one.reason}" if one.reason else ""
        lines.append(f"replica {one.replica}: {one.state}, policy version {one.policy_version}{jobs}{why}")
    return "\n".join(lines)


def _report_text(report: LoadReport) -> str:
    if not report.changed:
        return f"policy version {report.policy_version} was served already, digest {report.digest[:12]}"
    proof = "" if report.canary_difference is None else f", canary off by {report.canary_difference:.1e} nats"
    served = f"policy version {report.policy_version}, digest {report.digest[:12]}"
    waited = f", {report.finish_s:.1f} s for requests in flight, {report.cut} cut" if report.finish_s else ""
    return f"{served}, paused {1e3 * report.pause_s:.0f} ms{waited}{proof}"
