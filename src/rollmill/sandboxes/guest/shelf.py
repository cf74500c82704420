"""The shelf: holds the layers of snapshots after the sandboxes that wrote them have ended.

A layer is a file system in memory that was a sandbox's own. The shelf mounts each in a mount namespace that nobody
else sees, lends copies of the mount to new sandboxes, and lets go of it when told. It is forked from the zygote at the
first snapshot, and ends with it; the kernel then frees the layers.

    who waits for what
    shelf       a request of the zygote, or its end
    zygote      nothing: answers come when they come
    a child     does what takes its time (dropping, merging and storing), so that lending never waits
"""

from __future__ import annotations

import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from rollmill.sandboxes.guest import kernel
from rollmill.sandboxes.guest.kernel import MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC
from rollmill.sandboxes.guest.layers import lay, remove

GO = b"go"
_PLACE = "/tmp"  # in this namespace only
_MOST_REQUEST_BYTES = 256 * 1024
_MOST_DESCRIPTORS = 128
# Beyond what is merged: the directories above it, and rounding.
_SPARE_BYTES, _SPARE_INODES = 1024 * 1024, 256
Answer = tuple[dict[str, Any], list[int]]


class Shelf:
    """Takes requests one by one.

    Args:
        zygote: sequenced-packet socket.
    """

    def __init__(self, zygote: socket.socket) -> None:
        self._zygote = zygote

    def serve(self) -> None:
        """Serve until the zygote ends."""
        kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
        kernel.mount("layers", _PLACE, kind="tmpfs", flags=MS_NOSUID | MS_NODEV, data="size=1m,nr_inodes=0,mode=700")
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._zygote, _MOST_REQUEST_BYTES, _MOST_DESCRIPTORS)
            except ConnectionError:
                return
            if not message:
                return
            request = json.loads(message)
            if request["op"] in self._slow:
                self._aside(request, descriptors)
            else:
                self._answer(request, descriptors, self._quick[request["op"]])
            for one in descriptors:
                os.close(one)

    def _aside(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Let a child do it; where none can be made, a layer is dropped here and everything else refused."""
        act = self._slow[request["op"]]
        try:
            child = os.fork()
        except OSError as error:
            refusal = error  # the name of an exception ends with its clause

            def refuse(_: Shelf, __: dict[str, Any], ___: list[int]) -> Answer:
                raise refusal

            self._answer(request, descriptors, act if request["op"] == "drop" else refuse)
            return
        if child == 0:
            kernel.die_with_parent()
            self._answer(request, descriptors, act)
            os._exit(0)

    def _answer(
        self,
        request: dict[str, Any],
        descriptors: list[int],
        act: Callable[[Shelf, dict[str, Any], list[int]], Answer],
    ) -> None:
        answer: dict[str, Any]
        given: list[int] = []
        try:
            answer, given = act(self, request, descriptors)
        except OSError as error:
            answer = {"errno": error.errno or 0, "message": str(error)}
        text = json.dumps({"op": "kept", "n": request["n"], **answer}).encode()
        try:
            socket.send_fds(self._zygote, [text], given)
        except OSError:
            os._exit(0)  # the zygote is gone, and with it whoever could ask for a layer
        for one in given:
            os.close(one)

    def _hold(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Mount a layer here; answer with what is in it."""
        place = f"{_PLACE}/{request['layer']}"
        os.mkdir(place, 0o700)
        try:
            kernel.move_mount(descriptors[0], place)
        except OSError:
            os.rmdir(place)
            raise
        try:
            directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # What programs left in shared memory goes with the programs.
                remove("shm", directory)
            finally:
                os.close(directory)
            return self._finish(place), []
        except BaseException:
            _let_go(place)
            raise

    def _finish(self, place: str) -> dict[str, Any]:
        kernel.restrict_mount(place, attributes=kernel.MOUNT_ATTR_RDONLY)
        found = os.statvfs(place)
        return {"bytes": (found.f_blocks - found.f_bfree) * found.f_frsize, "inodes": found.f_files - found.f_ffree}

    def _lend(self, request: dict[str, Any], _: list[int]) -> Answer:
        """Give out copies of mounts, to be put below one sandbox."""
        trees: list[int] = []
        try:
            trees.extend(kernel.open_tree(f"{_PLACE}/{layer}") for layer in request["layers"])
        except OSError:
            for one in trees:
                os.close(one)
            raise
        return {}, trees

    def _drop(self, request: dict[str, Any], _: list[int]) -> Answer:
        """Let go of layers; those below a sandbox that lives are freed with it."""
        for layer in request["layers"]:
            place = f"{_PLACE}/{layer}"
            if os.path.isdir(place):
                _let_go(place)
        return {}, []

    def _merge(self, request: dict[str, Any], _: list[int]) -> Answer:
        """Make one layer of several, the uppermost first."""
        place = f"{_PLACE}/{request['layer']}"
        os.mkdir(place, 0o700)
        size = f"size={request['bytes'] + _SPARE_BYTES},nr_inodes={request['inodes'] + _SPARE_INODES},mode=755"
        kernel.mount("layer", place, kind="tmpfs", flags=MS_NOSUID | MS_NODEV, data=size)
        try:
            os.mkdir(f"{place}/up", 0o755)
            for layer in reversed(request["layers"]):
                _lay_layer(f"{_PLACE}/{layer}/up", f"{place}/up")
            return self._finish(place), []
        except BaseException:
            _let_go(place)
            raise

    def _join(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Make one layer of several of a disk, the uppermost first; the last directory is to hold it."""
        *sources, target = (f"/proc/self/fd/{one}" for one in descriptors)
        os.mkdir(f"{target}/up", 0o755)
        for source in reversed(sources):
            _lay_layer(f"{source}/up", f"{target}/up")
        kernel.sync_file_system(descriptors[-1])
        return {}, []

    def _store(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Copy a layer into a directory of a disk, and see that it is written."""
        target = f"/proc/self/fd/{descriptors[0]}"
        os.mkdir(f"{target}/up", 0o755)
        _lay_layer(f"{_PLACE}/{request['layer']}/up", f"{target}/up")
        kernel.sync_file_system(descriptors[0])
        return {}, []

    _quick: dict[str, Callable[[Shelf, dict[str, Any], list[int]], Answer]] = {  # noqa: RUF012
        "hold": _hold,
        "lend": _lend,
    }
    _slow: dict[str, Callable[[Shelf, dict[str, Any], list[int]], Answer]] = {  # noqa: RUF012
        "drop": _drop,
        "merge": _merge,
        "join": _join,
        "store": _store,
    }


def _let_go(place: str) -> None:
    kernel.detach(place)
    os.rmdir(place)


def _lay_layer(source: str, target: str) -> None:
    """Lay what was written at each mount of a sandbox over what is there; the names are ours, not the sandbox's."""
    for name in os.listdir(source):
        os.makedirs(f"{target}/{name}", exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        upper, lower = os.open(f"{source}/{name}", flags), os.open(f"{target}/{name}", flags)
        try:
            lay(upper, lower)
        finally:
            os.close(upper)
            os.close(lower)


def run(connection: socket.socket) -> None:
    """Serve as the shelf in a fresh clone of the zygote; never returns."""
    kernel.die_with_parent()
    kernel.close_all_except((0, 1, 2, connection.fileno()))
    kernel.set_name("sandbox-shelf")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its children
    try:
        connection.recv(len(GO))  # as a plain user this process owns nothing before its ids are mapped
        Shelf(connection).serve()
    except BaseException:
        traceback.print_exc()  # the zygote's stderr is read by its owner
    os._exit(0)
