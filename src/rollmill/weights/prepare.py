"""From a name to a model directory that every part can load.

Decides which kind of source a name is: the catalogue, a local Hugging Face directory, or a hub. Prepared models are
cached; two processes may prepare the same model at once, the first to finish wins. torch, transformers and
huggingface_hub are imported only inside functions, so that `--dry-run` can import this module without them.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollmill.errors import MissingExtraError, ModelError, WeightError
from rollmill.types import TensorEntry
from rollmill.weights.catalog import SMOLLM2, TINY_LLAMA, CatalogEntry, cache_directory, catalog, packaged_gguf
from rollmill.weights.files import fsync_directory, write_whole
from rollmill.weights.inspection import check_directory, weight_files
from rollmill.weights.tensorfile import digest_file, whole_digest, write_tensors

_SIDECAR = "rollmill.json"
_FORMAT = 1
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PARTIAL = ".partial-"


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory that is ready.

    Attributes:
        path: Hugging Face directory with configuration, safetensors, tokenizer and chat template.
        name: as it was asked for.
        dtype: dtype of the stored weights.
        parameters: stored numbers; a tied head counts once.
        digest: sha256 of the weights, as in a weight manifest.
    """

    path: Path
    name: str
    dtype: str
    parameters: int
    digest: str


class _Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept beside a prepared model, so that its digest need not be computed at every start."""

    format: int
    digest: str
    weight_bytes: int


def prepare(source: str | Path, *, cache_dir: str | Path | None = None, serving: bool = False) -> PreparedModel:
    """Return a ready model directory for a source, preparing it if that was not done before.

    Args:
        source: a name of `catalog()`, a local Hugging Face directory, or (with a hub) a hub name.
        cache_dir: where prepared models are kept; see `catalog.cache_directory`.
        serving: whether it is served alone, and not trained: then a directory may hold a model with a reward head.

    Raises:
        ModelError: if the source is unknown, incomplete or unsupported; says what was tried.
        MissingExtraError: if a package that it needs is not installed.
    """
    for entry in catalog():
        if entry.name == str(source):
            return _from_catalog(entry, cache_dir=cache_directory(cache_dir))
    if Path(source).is_dir():
        return _described(Path(source).resolve(), name=str(source), serving=serving)
    return _from_hub(str(source), serving=serving)


def find_prepared(source: str | Path, *, cache_dir: str | Path | None = None) -> Path | None:
    """Return the directory of a source that is ready now, without preparing anything; `None` if it is not."""
    for entry in catalog():
        if entry.name == str(source):
            target = cache_directory(cache_dir) / entry.cache_folder_name
            return target if _is_ready(target) else None
    return Path(source).resolve() if Path(source).is_dir() else None


def find_ready(source: str | Path, *, cache_dir: str | Path | None = None) -> Path | None:
    """Return the directory of a source if it is ready and can be trained as it is; `None` if it must be prepared.

    Needs no torch. What this package prepared was checked then.

    Raises:
        ModelError: if it is a directory that lacks something, in words.
    """
    path = find_prepared(source, cache_dir=cache_dir)
    if path is not None and _read_sidecar(path) is None:
        check_directory(path)
    return path


def _from_catalog(entry: CatalogEntry, *, cache_dir: Path) -> PreparedModel:
    target = cache_dir / entry.cache_folder_name
    if not _is_ready(target):
        makers: dict[str, Callable[[Path], None]] = {SMOLLM2: _make_smollm2(entry), TINY_LLAMA: _make_tiny_llama}
        _make_whole(target, makers[entry.name], name=entry.name)
    sidecar = _read_sidecar(target)
    return _described(target, name=entry.name, digest=sidecar.digest if sidecar else None)


def _is_ready(target: Path) -> bool:
    """Whether a prepared model lies there, whole, and made by this version of the preparation."""
    sidecar = _read_sidecar(target)
    return (
        sidecar is not None
        and sidecar.format == _FORMAT
        and sum(file.stat().st_size for file in target.glob("*.safetensors")) == sidecar.weight_bytes
    )


def _read_sidecar(target: Path) -> _Sidecar | None:
    try:
        return msgspec.json.decode((target / _SIDECAR).read_bytes(), type=_Sidecar)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError:
        return None  # damaged: as good as not there, the model is made again


def _make_smollm2(entry: CatalogEntry) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        _need(("torch", "transformers", "gguf"), name=entry.name)
        gguf = packaged_gguf(entry)
        from transformers import GenerationConfig, LlamaConfig

        from rollmill.weights.gguf_model import GgufLlama

        model = GgufLlama(gguf)
        config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="float32", **model.config())
        config.save_pretrained(directory)
        GenerationConfig.from_model_config(config).save_pretrained(directory)
        write_tensors(directory / "model.safetensors", model.tensors(), durable=True)
        model.save_tokenizer(directory)

    return make


def _make_tiny_llama(directory: Path) -> None:
    _need(("safetensors", "tokenizers"), name=TINY_LLAMA)
    from rollmill.weights import tiny_llama

    tiny_llama.make(directory)


def _need(packages: tuple[str, ...], *, name: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package=package, extra="torch", purpose=f"preparing model {name!r}")


def _make_whole(target: Path, make: Callable[[Path], None], *, name: str) -> None:
    """Make a model in a folder of its own and rename it into place; whoever is first wins."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}{_PARTIAL}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"model {name!r} cannot be prepared in {target.parent}: {error.strerror}. Set ROLLMILL_CACHE to a folder "
            "that you can write."
        ) from error
    _remove_abandoned(target)
    try:
        partial.chmod(0o755)
        make(partial)
        facts = check_directory(partial)
        sidecar = _Sidecar(format=_FORMAT, digest=_digest(partial), weight_bytes=facts.weight_bytes)
        write_whole(partial / _SIDECAR, msgspec.json.encode(sidecar) + b"\n")
        _rename_into_place(partial, target)
    except (OSError, WeightError) as error:
        raise ModelError(
            f"model {name!r} could not be prepared in {target.parent}: {error} Free some space there, or set "
            "ROLLMILL_CACHE to another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename_into_place(partial: Path, target: Path) -> None:
    if target.exists() and not _is_ready(target):
        damaged = partial.with_name(f"{partial.name}-damaged")
        target.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        partial.rename(target)
    except OSError:
        if not _is_ready(target):  # another process was first if it is there; else the failure is real
            raise
    fsync_directory(target.parent)


def _remove_abandoned(target: Path) -> None:
    """Remove folders of processes that died while they prepared this model."""
    for folder in target.parent.glob(f"{target.name}{_PARTIAL}*"):
        pid = int(folder.name.split(_PARTIAL)[1].split("-")[0])
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _described(path: Path, *, name: str, digest: str | None = None, serving: bool = False) -> PreparedModel:
    """Check a directory and describe it; the digest is computed where nobody has kept it."""
    facts = check_directory(path, serving=serving)
    return PreparedModel(
        path=path, name=name, dtype=facts.dtype, parameters=facts.parameters, digest=digest or _digest(path)
    )


def _digest(path: Path) -> str:
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(path):
        entries.update(digest_file(file))
    return whole_digest(entries)


def _from_hub(source: str, *, serving: bool) -> PreparedModel:
    names = [entry.name for entry in catalog()]
    near = difflib.get_close_matches(source, names, n=1)
    kinds = (
        f"A model source is one of: a name ({', '.join(names)}), a local directory with config.json, *.safetensors "
        "and tokenizer files, or a hub name like owner/model where the hub can be reached."
        + (f" Did you mean {near[0]!r}?" if near else "")
    )
    if not _HUB_NAME.fullmatch(source):
        raise ModelError(f"model {source!r}: there is no such directory, and it is no hub name. {kinds}")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise ModelError(
            f"model {source!r}: not in the catalogue, no such directory, and the hub was not asked because "
            f"HF_HUB_OFFLINE is set. {kinds}"
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtraError(package="huggingface_hub", extra="torch", purpose=f"model {source!r} from a hub")
    return _described(_download(source, kinds=kinds), name=source, serving=serving)


def _download(source: str, *, kinds: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model {source!r}: not in the catalogue, no such directory, and the hub did not give it: {first}. {kinds}"
        ) from error
