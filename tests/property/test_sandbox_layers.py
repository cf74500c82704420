"""A layer laid over another shows, above any image, what an overlay of both would."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandboxes.guest.layers import lay

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts on the disk of the tests need root")

GONE = "gone"
NAMES = st.sampled_from("abc")
FILES = st.binary(max_size=3)
# A node is bytes (a file), GONE (a whiteout), or (opaque, children).
NODES: st.SearchStrategy[Any] = st.recursive(
    FILES | st.just(GONE),
    lambda inner: st.tuples(st.booleans(), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
LAYERS = st.dictionaries(NAMES, NODES, max_size=3)
IMAGES = st.dictionaries(
    NAMES,
    st.recursive(FILES, lambda inner: st.tuples(st.just(False), st.dictionaries(NAMES, inner, max_size=3))),
    max_size=3,
)


def view(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what an overlay shows: names to bytes or to the view of a directory; the uppermost comes first."""
    shown: dict[str, Any] = {}
    for name in {one for layer in layers for one in layer}:
        below: list[dict[str, Any]] = []
        for layer in layers:
            node = layer.get(name)
            if node is None:
                continue
            if not isinstance(node, tuple):
                if not below and node != GONE:
                    shown[name] = node
                break
            below.append(node[1])
            if node[0]:
                break
        if below:
            shown[name] = view(below)
    return shown


def write(layer: dict[str, Any], directory: Path) -> None:
    for name, node in layer.items():
        path = directory / name
        if node == GONE:
            os.mknod(path, stat.S_IFCHR | 0o600, 0)
        elif isinstance(node, bytes):
            path.write_bytes(node)
        else:
            path.mkdir()
            if node[0]:
                os.setxattr(path, "user.overlay.opaque", b"y")
            write(node[1], path)


def read(directory: Path) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for path in directory.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISCHR(mode):
            layer[path.name] = GONE
        elif stat.S_ISREG(mode):
            layer[path.name] = path.read_bytes()
        else:
            layer[path.name] = ("user.overlay.opaque" in os.listxattr(path), read(path))
    return layer


@settings(max_examples=60, deadline=None)
@given(upper=LAYERS, lower=LAYERS, image=IMAGES)
def test_a_merged_layer_is_as_good_as_both_above_any_image(upper, lower, image):
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "upper", Path(scratch) / "lower"
        for directory, layer in ((source, upper), (target, lower)):
            directory.mkdir()
            write(layer, directory)
        flags = os.O_RDONLY | os.O_DIRECTORY
        one, other = os.open(source, flags), os.open(target, flags)
        try:
            lay(one, other)
        finally:
            os.close(one)
            os.close(other)
        assert view([read(target), image]) == view([upper, lower, image])
