"""`rollmill sandbox build-runsc`: gVisor's runtime from Debian's packages."""

from __future__ import annotations

from pathlib import Path

import click

from rollmill.sandboxes.backends.gvisor.build import build
from rollmill.sandboxes.backends.gvisor.settings import default_runsc


@click.command("build-runsc")
@click.option(
    "--target",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Where it goes; below the user's cache directory unless given, where sandboxes look for it.",
)
@click.option("--force", is_flag=True, help="Build it also where there is one.")
def build_runsc_command(target: Path | None, force: bool) -> None:
    """Build gVisor's runtime (runsc) from Debian's packages golang-gvisor-gvisor-dev, golang-go and g++.

    Its sources are of December 2022: good for tests and to try it out. In production install a current runsc.
    """
    wanted = default_runsc() if target is None else target
    if wanted.exists() and not force:
        click.echo(f"{wanted} is there already; --force builds it anew")
        return
    build(wanted, progress=click.echo)
    click.echo(f"built {wanted}")
