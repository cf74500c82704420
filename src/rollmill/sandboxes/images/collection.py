"""The law of what may go from the store. Pure: an inventory in, names to remove out.

    goes at once      layers that no image has; images whose name went to another one, once nobody used them for a while
    goes by need      images by last use, the oldest first, until the store fits its budget
    never goes        what a standing hold names, with all its layers

A preparation holds its layers until its manifest is written, so a layer without an image is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.sandboxes.records import Record


class ImageStock(Record, frozen=True, kw_only=True):
    """An image in the inventory.

    Attributes:
        layers: its layers.
        used_wall_s: when it was last used or prepared.
        named: whether it has a name.
    """

    layers: tuple[str, ...]
    used_wall_s: float = 0.0
    named: bool = True


class Inventory(Record, frozen=True, kw_only=True):
    """What is in the store.

    Attributes:
        images: by digest.
        layers: bytes that each takes, by id.
        held_images: digests that somebody holds.
        held_layers: ids that somebody holds.
    """

    images: dict[str, ImageStock]
    layers: dict[str, int]
    held_images: frozenset[str] = frozenset()
    held_layers: frozenset[str] = frozenset()


class Removal(Record, frozen=True, kw_only=True):
    """What goes.

    Attributes:
        images: digests.
        layers: ids.
        left_bytes: what stays.
        over_bytes: how far that is above the budget, because the rest is held.
    """

    images: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    left_bytes: int = 0
    over_bytes: int = 0


def choose(
    inventory: Inventory,
    *,
    now_wall_s: float,
    budget_bytes: int | None = None,
    grace_s: float = 3600.0,
    remove: Iterable[str] = (),
) -> Removal:
    """Return what goes.

    Args:
        inventory: what is there.
        now_wall_s: the time.
        budget_bytes: what the layers may take; `None`: nothing goes by need.
        grace_s: how long an image without a name is kept after its last use.
        remove: digests that somebody wants gone, unless they are held.
    """
    held = _held_layers(inventory)
    unwanted = frozenset(remove)
    kept = dict(inventory.images)
    for digest, image in inventory.images.items():
        forgotten = not image.named and now_wall_s - image.used_wall_s >= grace_s
        if digest not in inventory.held_images and (digest in unwanted or forgotten):
            del kept[digest]
    users = _users(kept, inventory, held)
    left = sum(inventory.layers[name] for name, count in users.items() if count)
    if budget_bytes is not None:
        left = _shrink(kept, users, inventory, held=held, left=left, budget_bytes=budget_bytes)
    return Removal(
        images=tuple(sorted(inventory.images.keys() - kept.keys())),
        layers=tuple(sorted(name for name, count in users.items() if not count)),
        left_bytes=left,
        over_bytes=0 if budget_bytes is None else max(0, left - budget_bytes),
    )


def _held_layers(inventory: Inventory) -> frozenset[str]:
    held = set(inventory.held_layers)
    for digest in inventory.held_images & inventory.images.keys():
        held.update(inventory.images[digest].layers)
    return frozenset(held)


def _users(kept: dict[str, ImageStock], inventory: Inventory, held: frozenset[str]) -> dict[str, int]:
    """Return how many images and holds keep each layer that is there."""
    users = {name: int(name in held) for name in inventory.layers}
    for image in kept.values():
        for name in set(image.layers) & users.keys():
            users[name] += 1
    return users


def _shrink(
    kept: dict[str, ImageStock],
    users: dict[str, int],
    inventory: Inventory,
    *,
    held: frozenset[str],
    left: int,
    budget_bytes: int,
) -> int:
    """Take images out, the least recently used first, until the rest fits; return what is left.

    An image all of whose layers are held is spared: nothing would be gained by forgetting it.
    """
    by_age = sorted(kept, key=lambda digest: (kept[digest].used_wall_s, digest))
    for digest in by_age:
        if left <= budget_bytes:
            break
        own = set(kept[digest].layers) & users.keys()
        if digest in inventory.held_images or own <= held:
            continue
        del kept[digest]
        for name in own:
            users[name] -= 1
            left -= 0 if users[name] else inventory.layers[name]
    return left
