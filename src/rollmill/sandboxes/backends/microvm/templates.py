"""Booted machines from which sandboxes are cloned: one for each image and size of memory, made at the first use.

    what it waits for                    who wakes it, and until when
    an image's layers                    the store
    disks and kernel                     a thread that makes them
    a machine's first word               the machine, `boot_s`

Those that wait for the same template wait for one boot. The least recently used goes when there are too many; clones of
it go on.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.errors import ImageError, SandboxError
from rollmill.sandboxes.backends.microvm import disks
from rollmill.sandboxes.backends.microvm import kit as kits
from rollmill.sandboxes.backends.microvm.channel import MachineChannel
from rollmill.sandboxes.backends.microvm.hypervisor import Hypervisor, Kept, Machine, Shape
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.microvm.settings import MIB, MicroVmSettings
from rollmill.sandboxes.backends.namespaces.checks import check_image
from rollmill.sandboxes.disk_records import ProcessMark
from rollmill.sandboxes.images.uses import ImageUses
from rollmill.sandboxes.records import DirectoryImage, HostImage, Image, NamedImage, SandboxSpec

_STEP_BYTES = 32 * MIB
MOST_LAYERS = 20


def memory_of(memory_bytes: int, *, overhead_bytes: int) -> int:
    """Return the memory of a machine for a sandbox; in steps, so that not every limit needs a template of its own.

    Example:
        >>> memory_of(100 * MIB, overhead_bytes=100 * MIB) // MIB
        224
    """
    return -(-(memory_bytes + overhead_bytes) // _STEP_BYTES) * _STEP_BYTES


class _Disks:
    """Disks of one image, held by the templates made of it."""

    def __init__(self, descriptors: tuple[int, ...], *, owned: bool) -> None:
        self.descriptors = descriptors
        self._owned = owned

    def close(self) -> None:
        for one in self.descriptors if self._owned else ():
            os.close(one)


class Template:
    """One booted machine.

    Attributes:
        kept: what clones are started from.
        boot_s: how long it took to boot.
    """

    def __init__(self, kept: Kept, *, boot_s: float) -> None:
        self.kept = kept
        self.boot_s = boot_s


class Templates:
    """The templates of one provider.

    Args:
        settings: how.
        hypervisor: runs the machines.
        images: where layers of named images come from.
        make_kit: makes what machines boot, in a thread; `None`: from the distribution's packages.
        on_started: writes the record of a machine that boots, by its name.
        on_ended: removes it.
    """

    def __init__(
        self,
        settings: MicroVmSettings,
        *,
        hypervisor: Hypervisor,
        images: ImageUses,
        make_kit: Callable[[], Kit] | None,
        on_started: Callable[[str, ProcessMark | None], None],
        on_ended: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._hypervisor = hypervisor
        self._images = images
        self._make_kit = make_kit or functools.partial(kits.make, kernel=settings.kernel, python=settings.python)
        self._on_started = on_started
        self._on_ended = on_ended
        self._made: OrderedDict[tuple[str, int], asyncio.Task[Template]] = OrderedDict()
        self._disks: dict[str, asyncio.Task[_Disks]] = {}
        self._kit: asyncio.Task[Kit] | None = None
        self._numbers = itertools.count(1)
        self._closed = False

    async def of(self, spec: SandboxSpec) -> Template:
        """Return the template for a spec; boot it at the first use.

        Raises:
            ImageError: if the image cannot be used.
            SandboxError: if no machine boots here; the message says why.
        """
        memory_bytes = memory_of(spec.limits.memory_bytes, overhead_bytes=self._settings.overhead_bytes)
        key = await self._image_key(spec.image), memory_bytes
        task = self._made.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._made[key] = asyncio.ensure_future(self._make(spec.image, *key))
            task.add_done_callback(_look)
        self._made.move_to_end(key)
        try:
            template = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise SandboxError("this provider was closed while a machine booted; open another one") from None
            raise
        self._drop_oldest()
        return template

    async def prepare(self, image: Image) -> None:
        """Make the disks of an image."""
        await self._disks_of(image, await self._image_key(image))

    async def close(self) -> None:
        """Let all go."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._made.values(), *self._disks.values()]
        tasks += [] if self._kit is None else [self._kit]
        for task in self._made.values():
            task.cancel()  # a machine that boots ends with this; threads that make files end soon by themselves
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if task.cancelled() or task.exception() is not None:
                continue
            made = task.result()
            (made.kept if isinstance(made, Template) else made).close()
        self._made.clear()
        self._disks.clear()
        self._kit = None

    def _drop_oldest(self) -> None:
        done = [key for key, task in self._made.items() if task.done()]
        for key in done[: max(0, len(self._made) - self._settings.templates)]:
            task = self._made.pop(key)
            if not task.cancelled() and task.exception() is None:
                task.result().kept.close()
            if not any(one == key[0] for one, _ in self._made):
                self._drop_disks(key[0])

    def _drop_disks(self, key: str) -> None:
        task = self._disks.pop(key, None)
        if task is not None and not task.cancelled() and task.exception() is None:
            task.result().close()

    async def _image_key(self, image: Image) -> str:
        """Return what tells images apart; a name of the store may stand for another image tomorrow."""
        check_image(image)
        if isinstance(image, DirectoryImage):
            return "directory:" + "\0".join(image.layers)
        if isinstance(image, NamedImage):
            return (await self._images.acquire(image.name, user=_user(image))).digest
        return "standin"

    # -- disks -------------------------------------------------------------------------------------------------------

    async def kit(self) -> Kit:
        """Return what machines boot; made at the first use."""
        if self._kit is None or (self._kit.done() and self._kit.exception() is not None):
            self._kit = asyncio.ensure_future(asyncio.to_thread(self._make_kit))
            self._kit.add_done_callback(_look)
        return await asyncio.shield(self._kit)

    async def _disks_of(self, image: Image, key: str) -> _Disks:
        task = self._disks.get(key)
        if task is None or (task.done() and task.exception() is not None):
            task = self._disks[key] = asyncio.ensure_future(self._make_disks(image))
            task.add_done_callback(_look)
        return await asyncio.shield(task)

    async def _make_disks(self, image: Image) -> _Disks:
        if isinstance(image, HostImage):
            return _Disks(((await self.kit()).standin_disk,), owned=False)
        if isinstance(image, NamedImage):
            layers = (await self._images.acquire(image.name, user=_user(image))).layers
        else:
            layers = image.layers
        if len(layers) > MOST_LAYERS:
            raise ImageError(f"an image of {len(layers)} layers has more than a machine has disks, {MOST_LAYERS}")
        made: list[int] = []
        try:
            for layer in layers:
                pack = asyncio.to_thread(disks.pack, Path(layer), scratch=self._settings.scratch)
                made.append(await pack)
        except BaseException:
            _Disks(tuple(made), owned=True).close()
            raise
        return _Disks(tuple(made), owned=True)

    # -- machines ----------------------------------------------------------------------------------------------------

    async def _make(self, image: Image, key: str, memory_bytes: int) -> Template:
        found = await self._disks_of(image, key)
        kit = await self.kit()
        shape = Shape(memory_bytes=memory_bytes, disks=found.descriptors)
        while True:
            try:
                return await self._boot(kit, shape)
            except SandboxError:
                if not self._hypervisor.another_way():
                    raise

    async def _boot(self, kit: Kit, shape: Shape) -> Template:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        limit_s = self._hypervisor.boot_limit_s(self._settings.boot_s)
        name = f"template-{os.getpid()}-{next(self._numbers)}"
        ended: asyncio.Future[str] = loop.create_future()
        started: list[ProcessMark] = []
        channel = MachineChannel(on_nonsense=lambda what: _tell(ended, what))

        def on_started(mark: ProcessMark) -> None:
            started.append(mark)
            self._on_started(name, mark)

        def on_ended(what: str) -> None:
            self._on_ended(name)  # not before: as long as there is a process there is a record of it
            _tell(ended, what)

        self._on_started(name, None)
        machine: Machine | None = None
        try:
            machine = await self._hypervisor.boot(kit, shape, name=name, on_started=on_started, on_ended=on_ended)
            await self._wait_for_agent(machine, channel, ended, limit_s=limit_s)
            await machine.pause()
            kept = await machine.keep(end=True)
        finally:
            channel.close()
            if machine is not None:
                machine.kill()
            if started:
                await asyncio.wait([ended], timeout=self._settings.end_s)
            else:
                self._on_ended(name)
        self._hypervisor.booted()
        return Template(kept, boot_s=loop.time() - begun_s)

    async def _wait_for_agent(
        self, machine: Machine, channel: MachineChannel, ended: asyncio.Future[str], *, limit_s: float
    ) -> None:
        booted = channel.expect("booted")

        async def hear() -> None:
            await channel.attach(await machine.connect())
            await asyncio.shield(booted)

        hearing = asyncio.ensure_future(hear())
        try:
            await asyncio.wait([hearing, ended], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hearing.cancel()
        if ended.done():
            raise SandboxError(f"the machine of a template ended while it booted: {ended.result()}")
        if not booted.done():
            said = machine.complaint()
            raise SandboxError(
                f"the machine of a template did not boot within {limit_s:g} s (boot_s). "
                + (f"Its console ends with: {said}" if said else "It said nothing on its console.")
            )


def _user(image: NamedImage) -> str:
    return f"machine/{image.name}"  # no sandbox has such an id


def _tell(future: asyncio.Future[str], what: str) -> None:
    if not future.done():
        future.set_result(what)


def _look(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
