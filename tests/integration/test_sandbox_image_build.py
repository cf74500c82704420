"""Recipes that are built in sandboxes."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from image_builders import add, new_store, small_root, trees
from rollmill.errors import DeadlineExceeded, ImageError
from rollmill.sandboxes import NamespaceSettings
from rollmill.sandboxes.images import ImageProgress, ImageStore, StoredImage
from rollmill.sandboxes.images.build import build_image
from rollmill.sandboxes.images.refusals import Refusal
from sandbox_builders import why_no_namespaces

pytestmark = pytest.mark.integration

HEAD = """
base = "base"
[build]
memory_mib = 128
disk_mib = 16
inodes = 2000
pids = 40
"""
# Stands in for the interpreter: what matters here is what it is given.
PYTHON = "#!/bin/sh\nls /tmp/rollmill-wheels > /installed\necho $PIP_BREAK_SYSTEM_PACKAGES $@ >> /installed\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    place = tmp_path_factory.mktemp("images")
    root = small_root(place / "root", programs=("sh", "cat", "ls", "rm", "mkdir", "touch", "chmod", "sleep"))
    for name in ("old", "dir/old"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    (root / "usr/bin/python3").write_text(PYTHON, encoding="ascii")
    (root / "usr/bin/python3").chmod(0o755)
    store = new_store(place / "store")
    add(store, root, name="base")
    return store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    return tmp_path / "recipe"


def build(store: ImageStore, place: Path, text: str, *, deadline_s: float = 60.0) -> tuple[StoredImage, list[str]]:
    """Build a recipe; return the image and the phases."""
    (place / "recipe.toml").write_text(HEAD + text, encoding="ascii")
    phases: list[str] = []

    def report(progress: ImageProgress) -> None:
        phases.append(progress.phase)

    settings = NamespaceSettings(directory=place.parent / "records")
    recipe = place / "recipe.toml"
    call = build_image(store, recipe, name="built", sandboxes=settings, report=report, deadline_s=deadline_s)
    return asyncio.run(call), phases


def nothing_left(store: ImageStore, place: Path) -> bool:
    records = place.parent / "records"
    left = [list(store.layout.part(part).iterdir()) for part in ("tmp", "holds", "trash")]
    return not any(left) and not (records.exists() and list(records.iterdir()))


FILL = "run = ['sh', '-c', 'while :; do cat /usr/bin/sh || exit 1; done > /big']"
STEPS = """
[[step]]
file = "/opt/app/main.txt"
source = "main.txt"
[[step]]
run = ["sh", "-c", "rm /old && rm -r /dir && mkdir /dir && touch /dir/new && chmod 711 /dir && echo $A > /made"]
env = { A = "value" }
[[step]]
run = ["sh", "-c", "cat /made /opt/app/main.txt > /both"]
"""


def test_steps_see_those_before_them_and_an_unchanged_recipe_is_built_once(store, place):
    (place / "main.txt").write_text("file\n", encoding="ascii")
    image, phases = build(store, place, STEPS)
    base, files, changes, both = trees(store, "built")
    assert (files / "opt/app/main.txt").read_text(encoding="ascii") == "file\n"
    assert (both / "both").read_text(encoding="ascii") == "value\nfile\n"
    gone = (changes / "old").lstat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    assert os.getxattr(changes / "dir", "user.overlay.opaque") == b"y"
    told = (changes / "dir").stat()
    assert (stat.S_IMODE(told.st_mode), told.st_uid) == (0o711, os.geteuid())
    assert (base / "old").exists()
    assert not any("as before" in one for one in phases)
    again, phases = build(store, place, STEPS)
    assert again.digest == image.digest
    assert sum("as before" in one for one in phases) == 3
    assert store.verify("built") == ()
    assert nothing_left(store, place)


def test_a_changed_file_builds_its_step_and_those_above_it_again(store, place):
    (place / "main.txt").write_text("one\n", encoding="ascii")
    build(store, place, STEPS)
    (place / "main.txt").write_text("two\n", encoding="ascii")
    _, phases = build(store, place, STEPS)
    assert not any("as before" in one for one in phases)
    assert (trees(store, "built")[-1] / "both").read_text(encoding="ascii") == "value\ntwo\n"


def test_a_step_whose_layer_was_collected_is_built_again(store, place):
    text = "[[step]]\nrun = ['touch', '/x']\n"
    build(store, place, text)
    store.remove("built")
    _, phases = build(store, place, text)
    assert not any("as before" in one for one in phases)


def test_packages_come_from_wheels_beside_the_recipe_which_are_not_left_in_the_image(store, place):
    (place / "wheels").mkdir()
    for name in ("b-1.whl", "a-1.whl"):
        (place / "wheels" / name).write_bytes(name.encode())
    build(store, place, "[[step]]\npip = ['a==1', 'b']\nwheels = 'wheels'\n")
    layer = trees(store, "built")[-1]
    seen = (layer / "installed").read_text(encoding="ascii").splitlines()
    assert seen[:2] == ["a-1.whl", "b-1.whl"]
    options = "-m pip install --no-index --no-cache-dir --disable-pip-version-check --find-links /tmp/rollmill-wheels"
    assert seen[2] == f"1 {options} -- a==1 b"
    assert not (layer / "tmp/rollmill-wheels").exists()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("run = ['sh', '-c', 'echo why >&2; exit 3']", "ended with 3 after .*: why"),
        ("run = ['sleep', '60']\ntimeout_s = 0.3", r"was killed \(timeout\)"),
        (
            "run = ['sh', '-c', 'while :; do cat /usr/bin/sh || exit 1; done > /big']",
            "ended with 1 after .*No space left",
        ),
        ("run = ['nowhere']", "ended with 127|nowhere"),
    ],
)
def test_a_step_that_fails_is_told_with_its_output_and_leaves_nothing(store, place, step, words):
    with pytest.raises(ImageError, match=words) as caught:
        build(store, place, f"[[step]]\n{step}\n")
    assert caught.value.reason == Refusal.BUILD.value
    assert nothing_left(store, place)


def test_a_build_has_no_network_and_ends_at_its_deadline(store, place):
    with pytest.raises(DeadlineExceeded, match="not ready at its deadline: step 1 of 1, run sleep 60"):
        build(store, place, "[[step]]\nrun = ['sleep', '60']\n", deadline_s=1.0)
    assert nothing_left(store, place)
    build(store, place, "[[step]]\nrun = ['sh', '-c', 'cat /proc/net/dev > /net']\n")
    lines = (trees(store, "built")[-1] / "net").read_text(encoding="ascii").splitlines()
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["lo"]
