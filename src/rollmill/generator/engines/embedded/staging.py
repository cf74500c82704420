"""New weights made ready in the spare set of buffers while the serving set is read.

| on | does |
|---|---|
| the staging thread | checks the tensors, casts, packs and copies them into the spare set (`write`) |
| the engine's thread, paused | exchanges the two sets if the spare one holds just these tensors (`swap`) |

What was written and not swapped in is worth nothing once something else is written: the old version serves on from its
own set, untouched. The buffers are kept and written again, so that later loads touch no new memory. Decides whether the
spare set may be swapped in; when it is written and swapped is the caller's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping

import torch

from rollmill.errors import EngineError, WeightMismatch
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.protocol import UpdateReport


class _Ready:
    """What the spare set holds: which version, of which tensors; it keeps none of them alive."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        self._policy_version = policy_version
        self._tensors = {name: weakref.ref(tensor) for name, tensor in tensors.items()}

    def is_of(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> bool:
        """Return whether this is this version of the very same tensors."""
        return (
            policy_version == self._policy_version
            and tensors.keys() == self._tensors.keys()
            and all(tensors[name] is made_from() for name, made_from in self._tensors.items())
        )


class Staging:
    """The spare set of a model's buffers, and what it holds.

    Args:
        model: whose weights are exchanged.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        # Held for the exchange and for marking what the spare set holds, never while numbers are written.
        self._lock = threading.Lock()
        self._ready: _Ready | None = None

    @torch.no_grad()
    def write(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, gives_up: Callable[[], bool]) -> bool:
        """Write weights into the spare set; one thread at a time, any thread.

        Args:
            tensors: must not change until they are swapped in.
            gives_up: asked before each tensor; if it says yes, nothing is ready afterwards.

        Returns:
            whether the weights are ready.

        Raises:
            WeightError: if names, shapes or dtypes do not fit.
            EngineError: if they cannot be read, or there is no memory for them. Nothing is ready then either.
        """
        pairs = self._model.check(tensors)
        with self._lock:
            self._ready = None
        try:
            for destination, value in pairs:
                if gives_up():
                    return False
                destination.stage(value)
        except (RuntimeError, TypeError, ValueError, OSError, MemoryError) as error:
            raise EngineError(
                f"the weights of policy version {policy_version} could not be made ready: {error}. Nothing was "
                "changed, the version before goes on being served. If memory is short, set generator.stage_weights "
                "to false"
            ) from error
        with self._lock:
            self._ready = _Ready(tensors, policy_version=policy_version)
        return True

    def swap(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> bool:
        """Exchange the sets if the spare one holds this version of these tensors; return whether that was so.

        Only while nothing reads the serving set. What served becomes the spare set.
        """
        with self._lock:
            if self._ready is None or not self._ready.is_of(tensors, policy_version=policy_version):
                return False
            self._ready = None
            self._model.swap()
            return True


def repeated_update(policy_version: int, *, digest: str, served: str) -> UpdateReport:
    """Return what an update to the version that is served did: nothing.

    Raises:
        WeightMismatch: if it is not the publication that is served.
    """
    if digest != served:
        raise WeightMismatch(
            f"policy version {policy_version} is served with digest {served}, the repeated update says {digest}: two "
            "publications share a number; clear the repository",
            published=digest,
            served=served,
        )
    return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=False)
