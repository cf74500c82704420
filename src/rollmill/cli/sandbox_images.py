"""`rollmill sandbox prepare` and `images`: the image store of this machine on the command line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rollmill.cli.output import json_option, show
from rollmill.cli.sandbox_options import store_option
from rollmill.errors import ImageError, SandboxError
from rollmill.sandboxes.images import (
    CollectReport,
    ImageProgress,
    ImageStore,
    ImageStoreSettings,
    Refusal,
    SourceKind,
    StoredImage,
    prepare_image,
)
from rollmill.sandboxes.images.build import build_image
from rollmill.sandboxes.images.settings import FORMS

_GIB = 1024**3
_MIB = 1024**2


@click.command("prepare")
@click.argument("image")
@click.option("--name", default=None, help="Name in the store; made from IMAGE unless given.")
@click.option("--ref", default=None, help="Which image of a layout or archive that holds several.")
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in SourceKind]),
    default=SourceKind.AUTO.value,
    show_default=True,
    help="What IMAGE is; found out unless given.",
)
@click.option("--form", type=click.Choice(FORMS), default="auto", show_default=True, help="How layers are kept.")
@click.option(
    "--deadline-s", type=click.FloatRange(min=0.1), default=3600.0, show_default=True, help="Then it is given up."
)
@store_option
@json_option
def prepare_command(image: str, store: Path | None, as_json: bool, **options: Any) -> None:
    """Make IMAGE ready for sandboxes, ahead of their start.

    IMAGE is a directory, an OCI layout (directory or archive), an archive of `docker save` or of a root file system,
    debian:SUITE, a recipe (NAME.toml), or the name of an image that is in the store already.
    """
    settings = ImageStoreSettings(directory=store, form=options["form"])
    opened = ImageStore(settings)
    report = None if as_json else _Reporter()
    if options["kind"] == SourceKind.AUTO.value and not Path(image).exists() and _is_there(opened, image):
        with opened.hold(image, what="preparation"):
            shown = opened.show(image)
    else:
        shown = asyncio.run(_prepare(opened, image, options=options, report=report))
    show(_row(shown), text=_words(shown), as_json=as_json)


async def _prepare(
    store: ImageStore, image: str, *, options: dict[str, Any], report: Callable[[ImageProgress], None] | None
) -> StoredImage:
    name = options["name"] or _name_of(image)
    if image.endswith(".toml") and options["kind"] == SourceKind.AUTO.value:
        return await build_image(store, Path(image), name=name, deadline_s=options["deadline_s"], report=report)
    return await prepare_image(
        store,
        image,
        name=name,
        kind=SourceKind(options["kind"]),
        ref=options["ref"],
        deadline_s=options["deadline_s"],
        report=report,
    )


def _is_there(store: ImageStore, image: str) -> bool:
    try:
        store.resolve(image)
    except ImageError as error:
        if error.reason in (Refusal.UNKNOWN.value, Refusal.NAME.value):
            return False
        raise
    return True


def _name_of(image: str) -> str:
    """Return a name for what was given: of a path its last part, without the endings of archives."""
    if not Path(image).exists():
        return image
    name = Path(image).resolve().name
    for ending in (".zst", ".gz", ".tgz", ".tar", ".toml"):
        name = name.removesuffix(ending)
    return name


class _Reporter:
    """Says on stderr what is being done, one line for each phase."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, progress: ImageProgress) -> None:
        if progress.phase != self._phase:
            self._phase = progress.phase
            size = f"{progress.done_bytes / _MIB:.1f} MiB, {progress.done_inodes} entries"
            click.echo(f"{progress.phase} ({size} so far)", err=True)


@click.command("images")
@click.option("--verify", is_flag=True, help="Read all images again, and say which are damaged.")
@click.option("--remove", multiple=True, metavar="NAME", help="Remove an image that nobody holds.")
@click.option("--collect", is_flag=True, help="Remove layers and old images that no name leads to.")
@click.option(
    "--budget-gib",
    type=click.FloatRange(min=0.0),
    default=None,
    help="Remove also what was not used for longest, until the layers take no more than this.",
)
@store_option
@json_option
def images_command(
    verify: bool, remove: tuple[str, ...], collect: bool, budget_gib: float | None, store: Path | None, as_json: bool
) -> None:
    """List the images of this machine's store, and remove what is not needed; never what somebody holds."""
    opened = ImageStore(ImageStoreSettings(directory=store))
    reports = [opened.remove(name) for name in remove]
    if collect or budget_gib is not None:
        budget = None if budget_gib is None else int(budget_gib * _GIB)
        reports.append(opened.collect(budget_bytes=budget))
    damage = _look_for_damage(opened) if verify else {}
    rows = [_row(image) for image in opened.images()]
    document = {"images": rows, "removed": reports, "damaged": damage}
    show(document, text=_table(rows, reports), as_json=as_json)
    if damage:
        first = next(iter(damage.values()))[0]
        raise SandboxError(f"{len(damage)} of {len(rows)} images are damaged: {', '.join(damage)}. {first}.")


def _look_for_damage(store: ImageStore) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for image in store.images():
        name = image.names[0] if image.names else image.digest
        try:
            problems = list(store.verify(image.digest))
        except ImageError as error:
            problems = [str(error)]
        if problems:
            found[name] = problems
    return found


def _row(image: StoredImage) -> dict[str, Any]:
    return {
        "names": list(image.names),
        "digest": image.digest,
        "layers": image.layers,
        "disk_bytes": image.disk_bytes,
        "inodes": image.inodes,
        "used_s": max(0.0, time.time() - image.used_wall_s),
        "held_by": list(image.held_by),
        "notes": list(image.notes),
        "config": image.config,
    }


def _words(image: StoredImage) -> str:
    size = f"{image.layers} layers, {image.disk_bytes / _MIB:.1f} MiB, {image.inodes} entries"
    lines = [f"{', '.join(image.names)} is ready: {size}", image.digest]
    return "\n".join([*lines, *(f"  note: {one}" for one in image.notes)])


def _table(rows: list[dict[str, Any]], reports: list[CollectReport]) -> str:
    lines = [f"{'NAME':<32} {'DIGEST':<12} {'LAYERS':>6} {'MIB':>9} {'USED':>9}  HELD BY"]
    for row in rows:
        name = ", ".join(row["names"]) or "-"
        digest = row["digest"].removeprefix("sha256:")[:12]
        size, used = row["disk_bytes"] / _MIB, f"{row['used_s']:.0f}s"
        lines.append(f"{name:<32} {digest:<12} {row['layers']:>6} {size:>9.1f} {used:>9}  {', '.join(row['held_by'])}")
        lines += [f"  note: {one}" for one in row["notes"]]
    listed = lines if rows else ["no images"]
    for report in reports:
        listed.append(f"removed {len(report.images)} images and {len(report.layers)} layers, {report.files} entries")
        if report.over_bytes:
            listed.append(f"still {report.over_bytes / _MIB:.1f} MiB above the budget: the rest is held")
    return "\n".join(listed)
