"""Builds images of recipes: each command runs in a sandbox of what is done so far, and what it wrote becomes a layer.

    what it waits for                     who wakes it, and until when
    a command of a step                   the sandbox, the step's `timeout_s`
    a layer that is unpacked              a thread, the deadline of the build

Not imported by the package: it needs a backend, and backends need the store.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from rollmill.clock import SystemClock
from rollmill.sandboxes.backends.namespaces.provider import NamespaceProvider
from rollmill.sandboxes.backends.namespaces.settings import NamespaceSettings
from rollmill.sandboxes.backends.namespaces.snapshot_disk import Manifest as SnapshotManifest
from rollmill.sandboxes.images.canonical import walk
from rollmill.sandboxes.images.layers import TreeLayer
from rollmill.sandboxes.images.preparation import Preparation
from rollmill.sandboxes.images.prepare import DEFAULT_DEADLINE_S, in_thread
from rollmill.sandboxes.images.recipe import Beside, Recipe, Step, digest_of, key_of, read
from rollmill.sandboxes.images.records import Layer, StoredImage
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.store import ImageStore
from rollmill.sandboxes.images.work import ImageProgress, Work
from rollmill.sandboxes.protocol import Sandbox
from rollmill.sandboxes.records import DirectoryImage, ExecResult, Lease, Limits, SandboxSpec

_MIB = 1024**2
_WHEELS = "/tmp/rollmill-wheels"
_TOLD_BYTES = 1500
_SPARE_S = 600.0
_PIP = ("python3", "-m", "pip", "install", "--no-index", "--no-cache-dir", "--disable-pip-version-check")
_PIP_ENV = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}


async def build_image(
    store: ImageStore,
    recipe: Path,
    *,
    name: str,
    sandboxes: NamespaceSettings | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    report: Callable[[ImageProgress], None] | None = None,
) -> StoredImage:
    """Make an image of a recipe; steps that were built before are taken as they are.

    Args:
        store: where to.
        recipe: its file; what it names lies beside it.
        name: of the image.
        sandboxes: how commands are isolated.
        deadline_s: seconds from now.
        report: told how far it is, from another thread.

    Raises:
        ImageError: if the recipe is wrong, or a step fails.
        DeadlineExceeded: if it took too long; finished steps stay.
        SandboxError: if a sandbox cannot be had.

    Cancellation: the running command is killed; finished steps stay.
    """
    clock = SystemClock()
    work = Work(store.settings.limits, deadline_s=clock.now_s() + deadline_s, report=report, clock=clock)
    parsed = await in_thread(lambda: read(recipe), work)
    builder = _Builder(store, parsed, Beside(recipe.parent), work=work, sandboxes=sandboxes or NamespaceSettings())
    return await builder.build(name, source=os.fspath(recipe))


class _Builder:
    def __init__(
        self, store: ImageStore, recipe: Recipe, beside: Beside, *, work: Work, sandboxes: NamespaceSettings
    ) -> None:
        self._store = store
        self._recipe = recipe
        self._beside = beside
        self._work = work
        self._sandboxes = sandboxes

    async def build(self, name: str, *, source: str) -> StoredImage:
        work, recipe = self._work, self._recipe
        with ExitStack() as stack:
            opened = self._store.preparing(name, source=source, work=work, base=recipe.base)
            preparation = await in_thread(lambda: stack.enter_context(opened), work)
            for number, step in enumerate(recipe.step, start=1):
                await self._step(preparation, step, title=f"step {number} of {len(recipe.step)}, {step.what()}")
            return await in_thread(preparation.finish, work)

    async def _step(self, preparation: Preparation, step: Step, *, title: str) -> None:
        below = [one.id for one in preparation.layers]
        inputs = await in_thread(lambda: self._inputs(step), self._work)
        key = key_of(step, below=below, inputs=inputs)
        known = await in_thread(lambda: self._store.recall_step(key), self._work)
        if known is not None and await in_thread(lambda: preparation.reuse(known), self._work):
            self._work.enter(f"{title}: as before")
            return
        self._work.enter(title)
        if step.file is not None:
            source = TreeLayer(lambda: self._beside.entries(step), what=title)
            layer = await in_thread(lambda: preparation.add(source), self._work)
            if layer.content != inputs:
                raise refused(Refusal.CHANGED, f"{title}: its source changed while it was read; build again")
        else:
            layer = await self._run(preparation, step, title=title)
        await in_thread(lambda: self._store.remember_step(key, layer.id), self._work)

    def _inputs(self, step: Step) -> str:
        """Return a digest of the files that a step takes."""
        if step.file is not None:
            return digest_of(self._beside.entries(step))
        if step.wheels is not None:
            return digest_of(self._beside.entries(Step(file=_WHEELS, source=step.wheels)))
        return ""

    async def _run(self, preparation: Preparation, step: Step, *, title: str) -> Layer:
        """Run a step in a sandbox, and make a layer of what it wrote."""
        with self._store.layout.scratch() as scratch:
            settings = msgspec.structs.replace(
                self._sandboxes,
                snapshot_directory=scratch / "kept",
                snapshot_bytes=2 * self._recipe.build.disk_mib * _MIB,
                snapshot_inodes=2 * self._recipe.build.inodes,
            )
            async with NamespaceProvider(settings) as provider:
                sandbox = await self._sandbox(provider, preparation, step)
                await self._do(sandbox, step, title=title)
                await sandbox.snapshot(id="built", stop_processes=True, end=True)
            written, first_id = _written(scratch / "kept")
            skipped: list[bytes] = []
            source = TreeLayer(
                lambda: walk(written, overlay=True, first_id=first_id, skipped=skipped), what=title, skipped=skipped
            )
            return await in_thread(lambda: preparation.add(source), self._work)

    async def _sandbox(self, provider: NamespaceProvider, preparation: Preparation, step: Step) -> Sandbox:
        build = self._recipe.build
        life_s = self._timeout_s(step) + _SPARE_S
        limits = Limits(
            memory_bytes=build.memory_mib * _MIB,
            disk_bytes=build.disk_mib * _MIB,
            inodes=build.inodes,
            pids=build.pids,
            cpus=float(os.cpu_count() or 1),
            wall_s=life_s,
        )
        layers = tuple(map(os.fspath, preparation.directories()))
        spec = SandboxSpec(image=DirectoryImage(layers=layers), limits=limits)
        lease = Lease(owner=f"build of {preparation.name}", ttl_s=life_s)
        labels = {"build": preparation.name}
        return await provider.create(spec, id=f"build-{uuid.uuid4().hex[:12]}", labels=labels, lease=lease)

    def _timeout_s(self, step: Step) -> float:
        wanted = self._recipe.build.timeout_s if step.timeout_s is None else step.timeout_s
        return self._work.left_s(most=wanted)

    async def _do(self, sandbox: Sandbox, step: Step, *, title: str) -> None:
        if step.pip is None:
            command = list(step.run or ())
            result = await sandbox.exec(command, cwd=step.cwd, env=step.env, timeout_s=self._timeout_s(step))
            self._require_success(result, title)
            return
        for path in sorted(self._beside.directory(step.wheels or "").iterdir()):
            if path.is_file() and not path.is_symlink():
                await sandbox.write_stream(f"{_WHEELS}/{path.name}", _pieces(path))
        command = [*_PIP, "--find-links", _WHEELS, "--", *step.pip]
        result = await sandbox.exec(command, env=_PIP_ENV, timeout_s=self._timeout_s(step))
        self._require_success(result, title)
        await sandbox.remove(_WHEELS, recursive=True)

    def _require_success(self, result: ExecResult, title: str) -> None:
        if result.exit_code == 0 and not result.killed_by:
            return
        if result.timed_out:
            self._work.check()  # the time of the whole build may be over
        how = f"was killed ({result.killed_by})" if result.killed_by else f"ended with {result.exit_code}"
        told = (result.stderr or result.stdout)[-_TOLD_BYTES:].decode("utf-8", "replace").strip()
        raise refused(Refusal.BUILD, f"{title} {how} after {result.wall_s:.1f} s: {told}")


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as stream:
        while data := stream.read(_MIB):
            yield data


def _written(kept: Path) -> tuple[Path, int]:
    """Return the directory of what the sandbox wrote, and what its owner 0 is there."""
    manifest = msgspec.json.decode((kept / "snapshots" / "built.json").read_bytes(), type=SnapshotManifest)
    first_id = manifest.kept.id_base
    (layer,) = manifest.kept.chain
    return kept / "layers" / layer / "up" / "image", os.geteuid() if first_id is None else first_id
