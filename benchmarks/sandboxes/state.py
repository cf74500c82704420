"""Sandboxes that stop and go on: snapshots at several sizes, restores, forks, pauses; and the first use of an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

from common import LEASE, MIB, Record, new_id, opened, spread, timed

from rollmill.sandboxes import HostImage, Limits, NamedImage, SandboxSpec
from rollmill.sandboxes.images import ImageStore, ImageStoreSettings, prepare_image

FORKS = 8
WRITES = """
import os, sys
files, size = int(sys.argv[1]), int(sys.argv[2])
os.makedirs("/workspace/tree", exist_ok=True)
for number in range(files):
    with open(f"/workspace/tree/{number}", "wb") as file:
        file.write(os.urandom(size))
"""
SIZES = {"empty": (0, 0), "5000 files, 50 MB": (5000, 10_000), "500 files, 500 MB": (500, 1_000_000)}


async def snapshots(*, repeats: int) -> Record:
    """Measure what suspending takes at several sizes, what coming back takes, and a fork into eight."""
    limits = Limits(memory_bytes=1024 * MIB, disk_bytes=700 * MIB, inodes=20_000, pids=64)
    spec = SandboxSpec(image=HostImage(), limits=limits)
    found: Record = {}
    for name, (files, size) in SIZES.items():
        times: dict[str, list[float]] = {}
        for _ in range(repeats):
            async with opened(snapshot_bytes=4096 * MIB) as provider:
                sandbox = await provider.create(spec, id=new_id(), lease=LEASE)
                if files:
                    wrote = await sandbox.exec(["python3", "-c", WRITES, str(files), str(size)], timeout_s=120.0)
                    if wrote.exit_code != 0:
                        raise RuntimeError(f"the files were not written: {wrote.stderr.decode()[-300:]}")
                at_s = time.perf_counter()
                ref = await sandbox.snapshot(id="one")
                times.setdefault("snapshot", []).append(time.perf_counter() - at_s)
                times.setdefault("first_exec_after_it", []).append(await timed(sandbox.exec(["true"])))
                at_s = time.perf_counter()
                copy = await provider.restore(ref, id=new_id(), lease=LEASE)
                times.setdefault("restore", []).append(time.perf_counter() - at_s)
                await copy.exec(["true"])
                times.setdefault("restore_to_first_exec", []).append(time.perf_counter() - at_s)
                ids = [new_id() for _ in range(FORKS)]
                times.setdefault("fork_to_8", []).append(await timed(sandbox.fork(ids, lease=LEASE)))
                times.setdefault("pause", []).append(await timed(copy.pause()))
                times.setdefault("resume", []).append(await timed(copy.resume()))
                times.setdefault("suspend", []).append(await timed(copy.snapshot(id="two", end=True)))
        found[name] = {what: spread(values) for what, values in times.items()}
    return found


async def first_use(*, repeats: int) -> Record:
    """Measure the first command in the first sandbox of an image that was prepared, and in the second one.

    The image is a shell, `true`, their libraries, and Python's standard library. Each repeat has a store of its own, so
    that nothing is mounted yet.
    """
    times: dict[str, list[float]] = {"prepare": [], "first_sandbox": [], "second_sandbox": []}
    with tempfile.TemporaryDirectory(prefix="bench-image-") as folder:
        root = Path(folder) / "root"
        _fill(root)
        found = [one.lstat().st_size for one in root.rglob("*") if one.is_file()]
        for number in range(repeats):
            settings = ImageStoreSettings(directory=Path(folder) / f"store-{number}")
            store = ImageStore(settings)
            times["prepare"].append(await timed(prepare_image(store, str(root), name="tools")))
            store.close()
            spec = SandboxSpec(image=NamedImage(name="tools"), limits=Limits(memory_bytes=256 * MIB))
            async with opened(images=settings) as provider:
                for which in ("first_sandbox", "second_sandbox"):
                    at_s = time.perf_counter()
                    sandbox = await provider.create(spec, id=new_id(), lease=LEASE)
                    await sandbox.exec(["true"])
                    times[which].append(time.perf_counter() - at_s)
    return {"files": len(found), "bytes": sum(found), **{what: spread(values) for what, values in times.items()}}


def _fill(root: Path) -> None:
    """Make a root file system of what this machine has."""
    (root / "usr/lib64").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("sh", "true"):
        program = shutil.which(name)
        if program is None:
            raise RuntimeError(f"this machine has no {name}")
        shutil.copy(os.path.realpath(program), root / "usr/bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", listed):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(library), target)
    ignore = shutil.ignore_patterns("__pycache__", "site-packages", "dist-packages", "test")
    shutil.copytree(sysconfig.get_path("stdlib"), root / "opt/python", ignore=ignore, ignore_dangling_symlinks=True)
