"""Which modules a kernel needs loaded, and in which order: a law over `modules.dep`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollmill.errors import SandboxError


def parse(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return path and needed paths of each module, by its name with `_` for `-`.

    Example:
        >>> parse("kernel/a/virtio-x.ko: kernel/b/virtio.ko")["virtio_x"]
        ('kernel/a/virtio-x.ko', ('kernel/b/virtio.ko',))
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for line in text.splitlines():
        path, _, needs = line.partition(":")
        found[_name(path)] = (path.strip(), tuple(needs.split()))
    return found


def order(wanted: Iterable[str], *, modules: Mapping[str, tuple[str, tuple[str, ...]]], built_in: str) -> list[str]:
    """Return paths of modules so that each comes after those that it needs.

    Args:
        wanted: names; one that is built into the kernel needs no loading.
        modules: as `parse` returns them.
        built_in: text of `modules.builtin`.

    Raises:
        SandboxError: if the kernel has no such module.
    """
    inside = {_name(line) for line in built_in.splitlines()}
    ordered: dict[str, None] = {}
    for name in wanted:
        if name in modules:
            _visit(modules[name][0], modules, ordered)
        elif name not in inside:
            raise SandboxError(
                f"the kernel has no module {name!r}, without which a sandbox cannot run in it. Use a kernel like "
                "Debian's linux-image-cloud-amd64 (settings: kernel)."
            )
    return list(ordered)


def _visit(path: str, modules: Mapping[str, tuple[str, tuple[str, ...]]], ordered: dict[str, None]) -> None:
    if path not in ordered:
        for needed in modules[_name(path)][1]:
            _visit(needed, modules, ordered)
        ordered[path] = None


def _name(path: str) -> str:
    return path.strip().rpartition("/")[2].partition(".ko")[0].replace("-", "_")
