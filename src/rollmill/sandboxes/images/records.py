"""What the store knows: manifests, layers, names, and who holds what. Pure; the store keeps them as JSON."""

from __future__ import annotations

import hashlib
import re
import urllib.parse

import msgspec

from rollmill.sandboxes.disk_records import ProcessMark, is_alive
from rollmill.sandboxes.images.extract import LayerFacts
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.records import Record

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,159}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ENCODER = msgspec.json.Encoder(order="sorted")


def is_digest(text: str) -> bool:
    """Return whether this is `sha256:` and 64 digits."""
    return _DIGEST.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return a name that an image can have.

    Raises:
        ImageError: if it cannot.
    """
    if not _NAME.fullmatch(name) or name.startswith("sha256:"):
        raise refused(
            Refusal.NAME,
            f"{name!r} cannot be an image's name: 1 to 160 letters, digits and any of . _ / : @ + -, beginning with a "
            "letter or digit, and not with 'sha256:'.",
        )
    return name


def file_name(name: str) -> str:
    """Return the name of the file that keeps an image's name."""
    return urllib.parse.quote(name, safe="") + ".json"


class ImageConfig(Record, frozen=True, kw_only=True):
    """What an image says of the programs that run in it. Told to whoever asks; a sandbox sets none of it by itself.

    Attributes:
        env: as NAME=VALUE.
        workdir: directory to start in.
        user: who runs them.
        command: entry point and arguments.
    """

    env: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""
    command: tuple[str, ...] = ()


class Manifest(Record, frozen=True, kw_only=True):
    """An image: layers and what it says of itself. Its digest is its name for good.

    Attributes:
        layers: ids of its layers, the lowest first.
        config: what it says of its programs.
        format: of this record.
    """

    layers: tuple[str, ...]
    config: ImageConfig = ImageConfig()
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Return the one text of this manifest."""
        return _ENCODER.encode(self)

    def digest(self) -> str:
        """Return `sha256:` and the digest of that text."""
        return f"sha256:{hashlib.sha256(self.encoded()).hexdigest()}"


class Layer(Record, frozen=True, kw_only=True):
    """An unpacked layer.

    Attributes:
        id: its name in the store: `content`, or a digest of that and of the layers below where they matter.
        content: sha256 of its archive, unpacked.
        form: `tree` or `erofs`.
        owners: whether its files have the image's owners; else they are of whoever unpacked it.
        facts: what is in it.
        seal: of its tree.
        disk_bytes: what it takes on disk, files shared with other layers included.
    """

    id: str
    content: str
    form: str = "tree"
    owners: bool = True
    facts: LayerFacts = LayerFacts()
    seal: str = ""
    disk_bytes: int = 0


class NameRecord(Record, frozen=True, kw_only=True):
    """A name of an image.

    Attributes:
        name: as given.
        digest: of the image's manifest.
        source: what it was made from, in words.
        prepared_wall_s: when.
    """

    name: str
    digest: str
    source: str = ""
    prepared_wall_s: float = 0.0


class HoldRecord(Record, frozen=True, kw_only=True):
    """A claim on images and layers: while it stands, nothing of them is removed.

    Attributes:
        what: who holds them, and what for, in words.
        images: digests of manifests.
        layers: ids of layers.
        owner: process that holds them; the claim ends with it.
        until_wall_s: when the claim ends otherwise; with an owner as well, the later of both counts.
        pinned_by: what on a disk stands on these, such as a directory of snapshots; until that lets go, no end of a
            process and no time ends the claim.
    """

    what: str
    images: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    owner: ProcessMark | None = None
    until_wall_s: float | None = None
    pinned_by: str = ""

    def stands(self, *, now_wall_s: float) -> bool:
        """Return whether it still counts."""
        if self.pinned_by or (self.until_wall_s is not None and now_wall_s < self.until_wall_s):
            return True
        return self.owner is not None and is_alive(self.owner)


class StoredImage(Record, frozen=True, kw_only=True):
    """An image of the store, as it is shown.

    Attributes:
        digest: of its manifest.
        names: its names.
        layers: how many layers it has.
        disk_bytes: what they take on disk, whatever is shared.
        inodes: their entries.
        used_wall_s: when it was last used or prepared.
        held_by: who holds it now.
        config: what it says of its programs.
        notes: what of its source is not in it.
    """

    digest: str
    names: tuple[str, ...] = ()
    layers: int = 0
    disk_bytes: int = 0
    inodes: int = 0
    used_wall_s: float = 0.0
    held_by: tuple[str, ...] = ()
    config: ImageConfig = ImageConfig()
    notes: tuple[str, ...] = ()


_NOTES = {
    "cleared_setuid": "setuid or setgid bits cleared",
    "dropped_devices": "device nodes below /dev left out",
    "dropped_sockets": "sockets left out",
    "dropped_attributes": "attributes without effect in a sandbox left out",
    "foreign_owners": "entries of owners above 65535 given to nobody",
    "foreign_markers": "names of another union file system left out",
}


def notes_of(layers: tuple[Layer, ...]) -> tuple[str, ...]:
    """Return, in words and with numbers, what of the sources of these layers is not in them."""
    sums = {name: sum(getattr(layer.facts, name) for layer in layers) for name in _NOTES}
    return tuple(f"{count} {_NOTES[name]}" for name, count in sums.items() if count)
