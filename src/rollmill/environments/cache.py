"""What a start would compute again: the pool of problems, and the longest prompt.

Keyed by everything that the result depends on, so that nothing has to be invalidated. Each file carries the digest of
its content; a damaged one is as good as none. Decides nothing; a folder that cannot be written makes starts slower,
nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmill.environments import gym_pool, split
from rollmill.environments.gym_pool import Mix, generate_in_child, pool_seed
from rollmill.environments.split import Problem
from rollmill.weights.catalog import cache_directory

FILES_KEPT = 32
_DIGEST_BYTES = 32
_PACKAGE = "reasoning-gym"


class TaskCache:
    """Small files under `$ROLLMILL_CACHE/tasks`, or `~/.cache/rollmill/tasks`.

    Args:
        root: another folder.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = cache_directory().parent / "tasks" if root is None else root

    def get(self, key: str) -> bytes | None:
        """Return what was kept under this key, `None` if there is nothing or it is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        content = data[_DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == data[:_DIGEST_BYTES] else None

    def put(self, key: str, content: bytes) -> None:
        """Keep this, and forget what was used longest ago."""
        path = self._path(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        # Without room or permission there is no cache; the run works the same.
        with contextlib.suppress(OSError):
            self._root.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(hashlib.sha256(content).digest() + content)
            partial.replace(path)
            for old in sorted(self._root.glob("*.cached"), key=_used_at, reverse=True)[FILES_KEPT:]:
                old.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._root / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cached"


def cached_pool(mixes: Sequence[Mix], *, cache: TaskCache) -> list[Problem]:
    """Return the pool that `generate_in_child` makes of these mixes, made once per version of what makes it.

    Raises:
        ConfigError, DataError, MissingExtraError, EnvironmentFault: as `generate_in_child`.
    """
    key = _pool_key(mixes)
    known = None if key is None else cache.get(key)
    if known is not None:
        return msgspec.msgpack.decode(known, type=list[Problem])
    problems = generate_in_child(mixes)
    if key is not None:
        cache.put(key, msgspec.msgpack.encode(problems))
    return problems


def _pool_key(mixes: Sequence[Mix]) -> str | None:
    """Return the key, or `None` where the generator may change under the same version number, or is missing."""
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return None
    sources = [Path(str(module.__file__)).read_bytes() for module in (gym_pool, split)]
    parts = {
        "mixes": [[mix.name, mix.options, mix.draws, pool_seed(mix)] for mix in mixes],
        "package": package.version,
        "python": sys.version,
        "code": hashlib.sha256(b"".join(sources)).hexdigest(),
    }
    return "pool " + json.dumps(parts, sort_keys=True, default=str)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # removed by another process just now
