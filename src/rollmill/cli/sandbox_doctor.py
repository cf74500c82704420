"""`rollmill sandbox doctor`: which backends and which protections work on this machine, and what is missing."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollmill.cli.output import json_option, show
from rollmill.cli.sandbox_backends import settings_of
from rollmill.cli.sandbox_options import BACKENDS, directory_option

if TYPE_CHECKING:
    from rollmill.sandboxes.doctor import Diagnosis
    from rollmill.sandboxes.overview import Overview


@click.command("doctor")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default=None,
    help="Look at this one alone, and say of each of its protections what it does; all backends unless given.",
)
@directory_option
@click.option(
    "--deadline-s",
    type=click.FloatRange(min=1.0),
    default=60.0,
    show_default=True,
    help="Longest that each backend may take; it is then reported as not known.",
)
@json_option
def doctor_command(directory: Path | None, as_json: bool, backend: str | None, deadline_s: float) -> None:
    """Make a sandbox with every backend of this machine; say what works, what protects, and what is missing.

    Hosted backends are sent nothing: for them it says whether the client is installed and the credentials are set.
    """
    if backend is None:
        from rollmill.sandboxes.overview.probes import look

        overview = asyncio.run(look(directory, deadline_s=deadline_s))
        show(overview, text=overview_words(overview), as_json=as_json)
        works = bool(overview.strongest)
    else:
        diagnosis = asyncio.run(_diagnose(backend, directory))
        show(diagnosis, text=_words(diagnosis), as_json=as_json)
        works = diagnosis.works
    if not works:
        sys.exit(1)


async def _diagnose(backend: str, directory: Path | None) -> Diagnosis:
    settings = settings_of(backend, directory=directory)
    if backend == "gvisor":
        from rollmill.sandboxes.backends.gvisor.diagnose import diagnose_gvisor

        return await diagnose_gvisor(settings)
    if backend == "qemu":
        from rollmill.sandboxes.backends.qemu.diagnose import diagnose_qemu

        return await diagnose_qemu(settings)
    from rollmill.sandboxes.doctor import diagnose

    return await diagnose(settings)


def overview_words(overview: Overview) -> str:
    """Return all backends as lines, then the protections of those that work as a table."""
    lines = []
    for one in overview.backends:
        level = f", isolation level {one.isolation}" if one.isolation else ""
        lines.append(f"{one.name:<16} {one.standing.value}{level}")
        lines.append(f"{'':<16} {one.why}")
        lines += [f"{'':<16} to do: {step}" for step in one.todo]
    return "\n".join([*lines, *_protections(overview), "", overview.summary])


def _protections(overview: Overview) -> list[str]:
    working = [one for one in overview.backends if one.findings]
    meanings = {finding.name: finding.meaning for one in working for finding in one.findings}
    if not working:
        return []
    widths = [max(len(one.name), 3) for one in working]
    lines = ["", "  ".join(["protection".ljust(20), *(one.name for one in working), "what it does"])]
    for name, meaning in meanings.items():
        cells = ({finding.name: finding.holds for finding in one.findings}.get(name) for one in working)
        shown = ["-" if held is None else "yes" if held else "NO" for held in cells]
        padded = [cell.ljust(width) for cell, width in zip(shown, widths, strict=True)]
        lines.append("  ".join([name.ljust(20), *padded, meaning]))
    return lines


def _words(diagnosis: Diagnosis) -> str:
    verdict = "works" if diagnosis.works else "does not work"
    lines = [f"backend {diagnosis.backend}: {verdict}, isolation level {diagnosis.isolation}"]
    if diagnosis.problem:
        lines.append(f"  problem: {diagnosis.problem}")
    for one in diagnosis.findings:
        lines.append(f"  {'yes' if one.holds else 'NO ':<3} {one.name:<21} {one.meaning}")
        if not one.holds:
            lines.append(f"      {'':<21} to get it: {one.remedy}")
    return "\n".join([*lines, *(f"  note: {one}" for one in diagnosis.notes)])
