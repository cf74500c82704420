"""How busy the GPUs are, asked from NVIDIA's management library where there is one. Decides nothing.

The library comes with the driver and is called by its C interface, so that no package is needed. What it cannot say (no
GPU, no driver, a slice of a GPU) is left out, never reported as 0.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class GpuMeter:
    """Utilisation of this machine's GPUs.

    Args:
        library: the management library, already loaded.
        visible: indices of the GPUs to report; all of them if `None`.
    """

    def __init__(self, library: ctypes.CDLL, *, visible: Sequence[int] | None = None) -> None:
        self._library = library
        self._visible = visible

    def read(self) -> dict[int, float]:
        """Return GPU -> share of the last sampling period in which it computed, 0 to 1; without those that are mute."""
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
            return {}
        indices = range(count.value) if self._visible is None else [i for i in self._visible if i < count.value]
        found: dict[int, float] = {}
        for index in indices:
            handle, used = ctypes.c_void_p(), _Utilization()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != _SUCCESS:
                continue
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == _SUCCESS:
                found[index] = used.gpu / 100
        return found


def find_gpus(*, visible_devices: str | None, library: str = LIBRARY) -> GpuMeter | None:
    """Return a meter, or `None` on a machine without NVIDIA's driver.

    Args:
        visible_devices: what CUDA_VISIBLE_DEVICES says; GPUs named otherwise than by number count as all.
        library: name or path of the management library.
    """
    with contextlib.suppress(OSError):
        loaded = ctypes.CDLL(library)
        if loaded.nvmlInit_v2() == _SUCCESS:
            return GpuMeter(loaded, visible=_indices(visible_devices))
    return None


def _indices(visible_devices: str | None) -> list[int] | None:
    if visible_devices is None:
        return None
    parts = [part.strip() for part in visible_devices.split(",") if part.strip()]
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else None
