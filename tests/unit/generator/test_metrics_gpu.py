"""The GPU meter against a library that speaks NVIDIA's interface."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollmill.generator.gpu import find_gpus

# Three GPUs: the first computes 73 % of the time, the second cannot say (a slice of one), the third is idle.
SOURCE = """
struct used { unsigned int gpu, memory; };
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) { *handle = (void *)(0x7f0000000000 + index);
  return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, struct used *used) {
  unsigned int index = (unsigned long)handle - 0x7f0000000000;
  if (index == 1) return 3;
  used->gpu = index ? 0 : 73; used->memory = 5; return 0; }
"""
COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make the library with")


def build(folder: Path, *, init: int) -> str:
    source, made = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(SOURCE.replace("INIT", str(init)))
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return str(made)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("nvml"), init=0)


def test_the_meter_reads_each_gpu_that_can_say_how_busy_it_is(library):
    meter = find_gpus(visible_devices=None, library=library)
    assert meter is not None
    assert meter.read() == {0: 0.73, 2: 0.0}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2", {2: 0.0}), ("0,1", {0: 0.73}), ("", {}), ("7", {}), ("GPU-5f1c", {0: 0.73, 2: 0.0})],
)
def test_only_the_visible_gpus_are_read(library, visible, expected):
    meter = find_gpus(visible_devices=visible, library=library)
    assert meter is not None
    assert meter.read() == expected


def test_a_driver_that_does_not_start_means_no_meter(tmp_path):
    assert find_gpus(visible_devices=None, library=build(tmp_path, init=9)) is None


def test_a_machine_without_the_driver_has_no_meter(tmp_path):
    assert find_gpus(visible_devices=None, library=str(tmp_path / "missing.so")) is None
