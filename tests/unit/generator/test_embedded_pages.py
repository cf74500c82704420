"""Memory in huge pages: ordinary tensors, each with its own place, freed with the last of a mapping."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmill.generator.engines.embedded import pages
from rollmill.generator.engines.embedded.pages import HugePages, missing, zeros


@given(sizes=st.lists(st.integers(0, 3000), max_size=12), chunk=st.sampled_from([64, 4096]))
def test_tensors_lie_beside_each_other_and_never_share_a_byte(sizes, chunk):
    room = HugePages(chunk_bytes=chunk)
    tensors = [room.empty(size, dtype=torch.int16) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert bool((tensor == number).all())
        assert size == 0 or tensor.data_ptr() % 64 == 0


def test_a_mapping_goes_with_its_last_tensor(monkeypatch):
    made = []

    def noted(size: int) -> mmap.mmap:
        mapping = Mapping(-1, size)
        made.append(weakref.ref(mapping))
        return mapping

    class Mapping(mmap.mmap):
        """One that can be referred to weakly."""

    monkeypatch.setattr(pages, "_mapping", noted)
    room = HugePages(chunk_bytes=4096)
    first, second, other = (room.empty(512, dtype=torch.float32) for _ in range(3))
    assert len(made) == 2
    del first
    gc.collect()
    assert made[0]() is not None
    del second
    gc.collect()
    assert made[0]() is None
    assert made[1]() is not None
    del other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_have_the_shape_and_are_zero(dtype):
    tensor = zeros((3, 5, 7), dtype=dtype)
    assert (tensor.shape, tensor.dtype, bool((tensor == 0).all())) == ((3, 5, 7), dtype, True)
    assert zeros((0, 4), dtype=dtype).shape == (0, 4)


def test_a_kernel_without_huge_pages_gives_the_same_memory(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pages.mmap, "mmap", Plain)
    assert bool((zeros((4,), dtype=torch.float32) == 0).all())


@pytest.mark.parametrize("choice", ["[always] madvise never", "always [madvise] never"])
def test_a_machine_with_huge_pages_is_not_complained_of(tmp_path, choice):
    (tmp_path / "enabled").write_text(choice)
    assert missing(tmp_path / "enabled") is None
    assert missing(tmp_path / "nothing") is None


def test_a_machine_without_is_told_of_with_the_command_that_changes_it(tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert f"echo madvise > {tmp_path / 'enabled'}" in (missing(tmp_path / "enabled") or "")
