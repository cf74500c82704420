"""Processes that prepare, use, remove and collect images at once, killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest

from image_builders import add_tars, directory, file, new_store, new_work, tar
from rollmill.errors import ImageError, RollmillError
from rollmill.sandboxes.images import ImageStore
from rollmill.sandboxes.images.build import Beside
from rollmill.sandboxes.images.layers import TreeLayer
from rollmill.sandboxes.images.recipe import Step

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROUNDS, AT_ONCE, MOST_S = 25, 3, 0.12
LAYERS = [
    tar(directory("d"), *(file(f"d/{number}-{i}", bytes([number + i]) * 6000, mtime=1) for i in range(10)))
    for number in range(5)
]


def work_until_killed(place: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = new_store(place / "store")
    while True:
        name = chance.choice("abc")
        try:
            act(store, place, name, chance)
        except RollmillError:
            continue  # gone meanwhile, or in use: what matters is what is left behind


def act(store: ImageStore, place: Path, name: str, chance: random.Random) -> None:
    kind = chance.randrange(6)
    if kind < 2:
        add_tars(store, *chance.sample(LAYERS, 2), name=name)
    elif kind == 2:
        entries = TreeLayer(lambda: Beside(place).entries(Step(file="/x/y", source="tree")), what="tree")
        store.add_image([entries], name=name, source="test", work=new_work(store))
    elif kind == 3:
        held = store.take(name, what="test")
        assert all(any(layer.iterdir()) for layer in held.layers)
        held.release()
    elif kind == 4:
        store.remove(name)
    else:
        store.collect(budget_bytes=chance.choice([0, 200_000]), grace_s=0.0)


def start(place: Path, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work_until_killed(place, seed)
        except BaseException:
            (place / "error").write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(1)
    return pid


def test_whatever_is_killed_when_every_name_leads_to_a_whole_image_and_nothing_else_is_left(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_bytes(b"t" * 6000)
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    for number in range(ROUNDS):
        pids = [start(tmp_path, seed + AT_ONCE * number + i) for i in range(AT_ONCE)]
        ended: list[int] = []
        for pid in pids:
            time.sleep(chance.uniform(0, MOST_S))
            os.kill(pid, signal.SIGKILL)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        what = f"round {number} of seed {seed}"
        failure = tmp_path / "error"
        assert not failure.exists(), f"{what}: {failure.read_text(encoding='utf-8')}"
        assert ended == [-signal.SIGKILL] * AT_ONCE, what
        store = new_store(tmp_path / "store")
        for part in ("tmp", "trash"):
            assert list(store.layout.part(part).iterdir()) == [], what
        for image in store.images():
            assert store.verify(image.digest) == (), what
        for name in store.layout.all_names():
            store.resolve(name.name)
    store = new_store(tmp_path / "store")
    report = store.collect(budget_bytes=0, grace_s=0.0)
    assert report.over_bytes == 0
    for part in ("layers", "images", "names", "holds", "steps", "tmp", "trash"):
        assert list(store.layout.part(part).iterdir()) == []
    assert not [path for path in store.layout.part("objects").rglob("*") if path.is_file()]
    with pytest.raises(ImageError, match="it is empty"):
        store.resolve("a")
