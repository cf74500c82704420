"""safetensors files: header, layout and verification without torch, writing from torch tensors.

Writing copies each tensor once, and digests it on the way or later, from the file. Decides nothing about versions.
Files that nobody overwrites are loaded through the `safetensors` library, published ones through a map of their own.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.errors import InvariantViolation, WeightError, WeightMismatch
from rollmill.types import TensorEntry
from rollmill.weights.files import check_space

if TYPE_CHECKING:
    import torch

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPE_NAMES = {code: name for name, code in _CODES.items()}
_LONGEST_HEADER_BYTES = 100_000_000  # the library's own limit
# Copy and digest in pieces that stay in the core's cache, so that the digest does not read from memory again.
_PIECE_BYTES = 1 << 20


def whole_digest(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the sha256 over the sorted `name NUL digest NEWLINE` lines."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(f"{name}\x00{tensors[name].sha256}\n".encode())
    return whole.hexdigest()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header (name -> dtype, shape, data_offsets) and the offset of the data.

    Raises:
        FileNotFoundError: if there is no such file; the caller knows why it should be there.
        WeightError: if it is cut short, or not safetensors.
    """
    with path.open("rb", buffering=0) as handle:
        return _read_header(handle, path=path)


def _read_header(handle: io.FileIO, *, path: Path) -> tuple[dict[str, Any], int]:
    try:
        handle.seek(0)
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > _LONGEST_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            low, high = entry["data_offsets"]
            if not (0 <= low <= high and isinstance(entry["dtype"], str) and isinstance(entry["shape"], list)):
                raise ValueError(f"the entry of {name!r} makes no sense")
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{path} is not a safetensors file, or its header is damaged: {error}.") from error
    size = os.fstat(handle.fileno()).st_size
    if size != 8 + length + end:
        raise WeightError(f"{path} has {size} bytes, its header says {8 + length + end}: it was cut short or changed.")
    return header, 8 + length


class TensorsInFile(dict[str, "torch.Tensor"]):
    """Tensors, and the file that they lie in, for a reader in another process.

    The file is what it was when they were loaded for as long as their version is held.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, path: Path) -> None:
        super().__init__(tensors)
        self.path = path


class MappedFile:
    """A safetensors file in memory, by one private map for digests and tensors: each page is touched once.

    The map keeps the open file, and with it the file's lock, until the last tensor is gone.

    Args:
        handle: the open file; may be closed afterwards.
        path: its name, for messages.

    Raises:
        WeightError: if it is damaged.
    """

    def __init__(self, handle: io.FileIO, *, path: Path) -> None:
        self._path = path
        self._header, self._start = _read_header(handle, path=path)
        self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)

    def entries(self) -> dict[str, TensorEntry]:
        """Return the entry of every tensor, digested from its bytes. Needs no torch."""
        entries: dict[str, TensorEntry] = {}
        with memoryview(self._map) as view:
            for name, entry in self._header.items():
                low, high = entry["data_offsets"]
                with view[self._start + low : self._start + high] as data:
                    digest = hashlib.sha256(data).hexdigest()
                entries[name] = TensorEntry(
                    dtype=DTYPE_NAMES.get(entry["dtype"], str(entry["dtype"])),
                    shape=tuple(entry["shape"]),
                    nbytes=high - low,
                    sha256=digest,
                )
        return entries

    def verify(self, expected: Mapping[str, TensorEntry], *, what: str) -> None:
        """Check the tensors against what was written; see `verify_file`."""
        check_entries(self.entries(), expected, what=what, path=self._path)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, as views of the map."""
        import torch

        found: dict[str, torch.Tensor] = {}
        for name, entry in self._header.items():
            dtype: torch.dtype = getattr(torch, DTYPE_NAMES[entry["dtype"]])
            low, high = entry["data_offsets"]
            if low == high:
                found[name] = torch.empty(entry["shape"], dtype=dtype)
                continue
            count = (high - low) // dtype.itemsize
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + low)
            found[name] = flat.reshape(entry["shape"])
        return found


def digest_file(path: Path) -> dict[str, TensorEntry]:
    """Return the entry of every tensor in a file, digested from its bytes. Needs no torch.

    Raises:
        FileNotFoundError: if there is no such file.
        WeightError: if it is damaged.
    """
    with path.open("rb", buffering=0) as handle:
        return MappedFile(handle, path=path).entries()


def verify_file(path: Path, expected: Mapping[str, TensorEntry], *, what: str) -> None:
    """Check a file's tensors against what was written.

    Args:
        what: what the file is, for the message (`version 12`).

    Raises:
        WeightMismatch: naming the first tensor that differs, with both digests.
        FileNotFoundError: if there is no such file.
        WeightError: if it is not safetensors.
    """
    check_entries(digest_file(path), expected, what=what, path=path)


def entries_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Return the entry of every tensor, digested from its memory."""
    return {
        name: TensorEntry(
            dtype=dtype_name(tensor),
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            sha256=hashlib.sha256(_bytes_of(tensor)).hexdigest(),
        )
        for name, tensor in tensors.items()
    }


def check_entries(
    found: Mapping[str, TensorEntry], expected: Mapping[str, TensorEntry], *, what: str, path: Path
) -> None:
    """Check entries read from a file against those that were written; raises as `verify_file` does."""
    if found.keys() != expected.keys():
        differ = sorted(found.keys() ^ expected.keys())
        raise WeightMismatch(
            f"{what}: {path} has {len(found)} tensors, published were {len(expected)}; {differ[:3]} differ. "
            "Another file lies in its place: publish again, or load another version.",
            published=whole_digest(expected),
            served=whole_digest(found),
        )
    for name, entry in expected.items():
        if found[name] != entry:
            raise WeightMismatch(
                f"{what}: tensor {name!r} in {path} has sha256 {found[name].sha256} ({found[name].dtype} "
                f"{list(found[name].shape)}), published was {entry.sha256} ({entry.dtype} {list(entry.shape)}). "
                "The memory or the disk changed it: publish again, or load another version.",
                published=entry.sha256,
                served=found[name].sha256,
            )


def check_distinct(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that no two tensors share memory.

    Raises:
        WeightError: naming the first two that do.
    """
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.numel():
            extent = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + extent * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise WeightError(
                f"tensors {name!r} and {other!r} share memory (tied weights). Give each distinct tensor once, for "
                "example `dict(model.named_parameters())`; the loader ties them again. Nothing was written."
            )


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, durable: bool) -> dict[str, TensorEntry]:
    """Write tensors into a new safetensors file with one copy each, and return their entries.

    Args:
        durable: flush to the disk before returning; memory file systems need no flush.

    Raises:
        WeightError: if nothing was given, tensors share memory, a dtype has no code, or the space is full. The
            partial file is removed then.
    """
    prefix, offsets, size = _checked_layout(tensors)
    check_space(path.parent, needed_bytes=size, what=path.name, action="Free space, or keep fewer versions.")
    try:
        return _write(path, tensors, prefix=prefix, offsets=offsets, size=size, durable=durable)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightError(
            f"{path.name} could not be written: {error.strerror}. It needs {size} bytes in {path.parent}. Free space "
            "there, or choose another place. The partial file was removed."
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def copy_tensors(handle: io.FileIO, tensors: Mapping[str, torch.Tensor], *, path: Path) -> None:
    """Write tensors into an open file with one copy each, from its beginning, and digest nothing.

    Args:
        handle: a new file, or one whose content may be overwritten.
        path: its name, for messages.

    Raises:
        WeightError: if nothing was given, tensors share memory, a dtype has no code, or the space is full.
    """
    prefix, offsets, size = _checked_layout(tensors)
    has_bytes = os.fstat(handle.fileno()).st_blocks * 512
    check_space(
        path.parent, needed_bytes=max(0, size - has_bytes), what=path.name, action="Free space, or keep fewer versions."
    )
    try:
        handle.seek(0)
        handle.truncate(size)
        _write_all(handle, memoryview(prefix))
        for name, (low, high) in offsets.items():
            if low < high:
                _write_all(handle, _bytes_of(tensors[name]))
    except OSError as error:
        raise WeightError(
            f"{path.name} could not be written: {error.strerror}. It needs {size} bytes in {path.parent}. Free space "
            "there, or choose another place."
        ) from error
    if handle.tell() != size:
        raise InvariantViolation(f"{path.name}: wrote {handle.tell()} bytes, the header says {size}")


def _write_all(handle: io.FileIO, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += handle.write(data[at:])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checked_layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Return the file's beginning, where each tensor's bytes lie behind it, and the file's size."""
    if not tensors:
        raise WeightError("no tensors were given to write. Give the parameters of the model. Nothing was written.")
    check_distinct(tensors)
    prefix, offsets = _layout(tensors)
    return prefix, offsets, len(prefix) + max(end for _, end in offsets.values())


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the file's beginning and where each tensor's bytes lie behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    # Widest elements first: every tensor then starts at a multiple of its element size, as the library lays out too.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        code = _CODES.get(dtype_name(tensor))
        if code is None:
            raise WeightError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold. Convert it.")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        offsets[name] = (at, end)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets


def _write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    prefix: bytes,
    offsets: Mapping[str, tuple[int, int]],
    size: int,
    durable: bool,
) -> dict[str, TensorEntry]:
    with path.open("xb", buffering=0) as handle:
        handle.write(prefix)
        entries = {
            name: TensorEntry(
                dtype=dtype_name(tensors[name]),
                shape=tuple(tensors[name].shape),
                nbytes=high - low,
                sha256=_write_digesting(tensors[name], handle, nbytes=high - low),
            )
            for name, (low, high) in offsets.items()
        }
        if handle.tell() != size:
            raise InvariantViolation(f"{path.name}: wrote {handle.tell()} bytes, the header says {size}")
        if durable:
            os.fsync(handle.fileno())
    return entries


def _write_digesting(tensor: torch.Tensor, handle: io.FileIO, *, nbytes: int) -> str:
    """Append a tensor's bytes to the file; return their sha256.

    A write copies straight from the tensor into the file's pages, the only copy there is, and reports a full file
    system as an error; writing through a memory map would first fill the pages with zeros, and be killed by SIGBUS.
    """
    digest = hashlib.sha256()
    if nbytes == 0:
        return digest.hexdigest()
    source = _bytes_of(tensor)
    at = 0
    while at < nbytes:
        piece = source[at : at + _PIECE_BYTES]
        written = handle.write(piece)
        digest.update(piece[:written])
        at += written
    return digest.hexdigest()


def dtype_name(tensor: torch.Tensor) -> str:
    """Return `float32` for `torch.float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, memory-mapped; they stay valid after the file is unlinked."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
