"""What an image is made from: OCI layouts, archives of Docker, plain archives, directories; and what is none."""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import shutil
import socket
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from image_builders import (
    Layout,
    add,
    add_tars,
    archive_layer,
    device,
    digest_of,
    directory,
    file,
    link,
    new_store,
    new_work,
    small,
    tar,
    trees,
)
from rollmill.errors import ImageError, MissingExtraError
from rollmill.sandboxes.images import ImageConfig, ImageStore, SourceKind, canonical, compression, debian
from rollmill.sandboxes.images.compression import unpacked
from rollmill.sandboxes.images.refusals import Refusal

LOWER = tar(file("what", b"lower"), file("gone"))
OTHER = tar(file("other"))
UPPER = tar(file("what", b"upper"), file(".wh.gone"))
FOREIGN = "arm64" if platform.machine() == "x86_64" else "amd64"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return new_store(tmp_path / "store")


def refusal_of(store: ImageStore, source: Path | str, **options: Any) -> Refusal:
    with pytest.raises(ImageError) as caught:
        add(store, source, **options)
    assert store.images() == ()
    return Refusal(caught.value.reason)


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def files_of(store: ImageStore) -> list[Path]:
    return [one for one in store.layout.directory.rglob("*") if one.is_file() and not one.is_symlink()]


def docker_archive(*layers: bytes, tags: list[str] | None = None) -> bytes:
    """As `docker save` wrote it before it wrote OCI layouts: each layer in a directory, equal ones as links."""
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": [digest_of(one) for one in layers]}}).encode()
    members = [file("abc.json", config)]
    names: dict[bytes, str] = {}
    for number, layer in enumerate(layers):
        name = f"l{number}/layer.tar"
        if layer in names:
            members.append(link(name, f"../{names[layer]}"))
        else:
            members.append(file(name, layer))
            names[layer] = name
    listed = [f"l{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "abc.json", "RepoTags": tags, "Layers": listed}]
    return tar(*members, file("manifest.json", json.dumps(manifest).encode()))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("form", ["directory", "archive", "packed archive"])
def test_an_oci_image_becomes_its_layers_with_what_it_says_of_its_programs(store, tmp_path, packed, form):
    run = {"Env": ["A=b"], "WorkingDir": "/w", "User": "u", "Entrypoint": ["/e"], "Cmd": ["c"]}
    layout = Layout(LOWER, UPPER, packed=packed, config=run)
    if form == "directory":
        source = layout.write(tmp_path / "layout")
    else:
        data = layout.archive()
        source = save(tmp_path / "image.tar", gzip.compress(data) if form == "packed archive" else data)
    image = add(store, source)
    assert image.config == ImageConfig(env=("A=b",), workdir="/w", user="u", command=("/e", "c"))
    assert [(tree / "what").read_bytes() for tree in trees(store)] == [b"lower", b"upper"]
    assert store.resolve("image")[1].layers == (digest_of(LOWER), digest_of(UPPER))


def test_an_archive_of_docker_is_read_with_equal_layers_written_once(store, tmp_path):
    image = add(store, save(tmp_path / "saved.tar", docker_archive(LOWER, UPPER, LOWER, tags=["a:1"])))
    assert image.layers == 3
    assert store.resolve("image")[1].layers == tuple(map(digest_of, (LOWER, UPPER, LOWER)))
    assert len(list(store.layout.part("layers").iterdir())) == 2


def test_a_plain_archive_and_a_directory_are_one_layer(store, tmp_path):
    archive = save(tmp_path / "root.tar.gz", gzip.compress(tar(file("f", b"x"))))
    assert add(store, archive, name="archive").layers == 1
    (tmp_path / "root").mkdir()
    save(tmp_path / "root/f", b"x")
    assert add(store, tmp_path / "root", name="directory").layers == 1
    assert [(trees(store, name)[0] / "f").read_bytes() for name in ("archive", "directory")] == [b"x", b"x"]


def test_a_root_file_system_that_looks_like_an_image_is_taken_as_one_only_when_told(store, tmp_path):
    data = tar(file("manifest.json", b"{}"), file("f", b"x"))
    path = save(tmp_path / "root.tar", data)
    assert refusal_of(store, path) is Refusal.MALFORMED
    assert add(store, path, kind=SourceKind.ARCHIVE).layers == 1


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("nowhere", {}),
        ("store", {"kind": SourceKind.ARCHIVE}),
        ("file", {"kind": SourceKind.DIRECTORY}),
        ("store", {"kind": SourceKind.IMAGE}),
    ],
)
def test_what_is_no_source_is_refused(store, tmp_path, source, options):
    save(tmp_path / "file", b"x")
    assert refusal_of(store, tmp_path / source, **options) in (Refusal.UNKNOWN, Refusal.TRUNCATED)


# -- layouts that contradict themselves -------------------------------------------------------------------------------


def test_a_blob_that_was_changed_is_refused_by_its_digest(store, tmp_path):
    layout = Layout(LOWER)
    index = layout.write(tmp_path / "layout")
    packed = json.loads(json.dumps(layout.manifest))["layers"][0]["digest"]
    path = index / "blobs" / packed.replace(":", "/")
    data = gzip.compress(tar(file("what", b"evil!"), file("gone")), mtime=0)
    path.write_bytes(data[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))
    assert refusal_of(store, index) in (Refusal.DIGEST, Refusal.TRUNCATED, Refusal.MALFORMED)


def test_a_layer_whose_content_has_another_digest_is_refused(store, tmp_path):
    layout = Layout(LOWER)
    layout.config["rootfs"]["diff_ids"] = [digest_of(UPPER)]
    assert refusal_of(store, layout.write(tmp_path / "layout")) is Refusal.DIGEST


def test_a_blob_of_another_length_is_refused(store, tmp_path):
    layout = Layout(LOWER)
    layout.manifest["layers"][0]["size"] += 1
    assert refusal_of(store, layout.write(tmp_path / "layout")) is Refusal.DIGEST


def test_a_document_of_another_digest_is_refused(store, tmp_path):
    layout = Layout(LOWER).write(tmp_path / "layout")
    index = json.loads((layout / "index.json").read_bytes())
    path = layout / "blobs" / index["manifests"][0]["digest"].replace(":", "/")
    path.write_bytes(path.read_bytes() + b" ")
    assert refusal_of(store, layout) is Refusal.DIGEST


def change(layout: Layout, what: str) -> None:
    if what == "missing blob":
        del layout.blobs[layout.manifest["layers"][0]["digest"]]
    elif what == "media type":
        layout.manifest["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.nondistributable.v1.tar"
    elif what == "other digest":
        layout.manifest["layers"][0]["digest"] = "sha512:" + "0" * 128
    elif what == "traversal":
        layout.manifest["layers"][0]["digest"] = "sha256:../../../../etc/passwd"
    elif what == "fewer contents":
        layout.config["rootfs"]["diff_ids"] = []
    elif what == "no digest":
        layout.config["rootfs"]["diff_ids"] = ["md5:0"]
    elif what == "another machine":
        layout.config["architecture"] = FOREIGN
    elif what == "another system":
        layout.config["os"] = "windows"
    elif what == "mistyped":
        layout.manifest["layers"] = {"a": 1}


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("missing blob", Refusal.TRUNCATED),
        ("media type", Refusal.MEDIA_TYPE),
        ("other digest", Refusal.MALFORMED),
        ("traversal", Refusal.MALFORMED),
        ("fewer contents", Refusal.MALFORMED),
        ("no digest", Refusal.MALFORMED),
        ("another machine", Refusal.MEDIA_TYPE),
        ("another system", Refusal.MEDIA_TYPE),
        ("mistyped", Refusal.MALFORMED),
    ],
)
@pytest.mark.parametrize("archive", [True, False])
def test_a_layout_that_cannot_be_meant_is_refused(store, tmp_path, what, kind, archive):
    layout = Layout(LOWER)
    change(layout, what)
    source = save(tmp_path / "l.tar", layout.archive()) if archive else layout.write(tmp_path / "layout")
    assert refusal_of(store, source) is kind


def test_of_several_images_the_one_that_is_named_is_taken_or_the_one_for_this_machine(store, tmp_path):
    one, two = Layout(LOWER), Layout(OTHER)
    entries = [json.loads(layout.index())["manifests"][0] for layout in (one, two)]
    for entry, name in zip(entries, ("a:1", "b:2"), strict=True):
        entry["annotations"] = {"org.opencontainers.image.ref.name": name}
    one.blobs.update(two.blobs)
    one.entries = entries
    source = one.write(tmp_path / "layout")
    with pytest.raises(ImageError, match=r"2 images.*a:1, b:2"):
        add(store, source)
    add(store, source, ref="b:2")
    assert store.resolve("image")[1].layers == (digest_of(OTHER),)
    assert refusal_of(new_store(tmp_path / "other"), source, ref="c") is Refusal.UNKNOWN


def test_an_index_of_machines_leads_to_this_one(store, tmp_path):
    here = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    one, two = Layout(LOWER), Layout(OTHER)
    entries = [json.loads(layout.index())["manifests"][0] for layout in (one, two)]
    entries[0]["platform"] = {"os": "linux", "architecture": FOREIGN}
    entries[1]["platform"] = {"os": "linux", "architecture": here}
    attestation = {**entries[0], "annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    one.blobs.update(two.blobs)
    nested = one.blob(json.dumps({"manifests": [attestation, *entries]}).encode())
    one.entries = [{"mediaType": "application/vnd.oci.image.index.v1+json", **nested}]
    add(store, one.write(tmp_path / "layout"))
    assert store.resolve("image")[1].layers == (digest_of(OTHER),)


def test_indexes_that_lead_nowhere_end(store, tmp_path):
    layout = Layout(LOWER)
    entry = json.loads(layout.index())["manifests"][0]
    for _ in range(10):
        nested = layout.blob(json.dumps({"manifests": [entry]}).encode())
        entry = {"mediaType": "application/vnd.oci.image.index.v1+json", **nested}
    layout.entries = [entry]
    assert refusal_of(store, layout.write(tmp_path / "layout")) is Refusal.MALFORMED


def test_a_document_above_the_limit_is_not_read(tmp_path):
    store = new_store(tmp_path / "store", limits=small(document_bytes=100))
    layout = Layout(LOWER)
    layout.config["history"] = "x" * 200
    assert refusal_of(store, layout.write(tmp_path / "layout")) is Refusal.TOO_LARGE


@pytest.mark.parametrize("text", [b"", b"[", b"\xff", b"[" * 100_000, b"null", b"[]"])
def test_documents_that_are_none_are_refused(store, tmp_path, text):
    source = save(tmp_path / "saved.tar", tar(file("manifest.json", text)))
    assert refusal_of(store, source) in (Refusal.MALFORMED, Refusal.UNKNOWN)


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ([link("l0/layer.tar", "../../../etc/passwd")], Refusal.TRAVERSAL),
        ([link("l0/layer.tar", "../l0/layer.tar")], Refusal.TRUNCATED),
        ([file("abc.json", b"{}"), file("abc.json", b"{}")], Refusal.DUPLICATE),
        ([file("../abc.json", b"{}")], Refusal.TRAVERSAL),
    ],
)
def test_archives_that_lead_out_of_themselves_are_refused(store, tmp_path, members, kind):
    config = json.dumps({"rootfs": {"diff_ids": [digest_of(LOWER)]}}).encode()
    manifest = json.dumps([{"Config": "c.json", "Layers": ["l0/layer.tar"]}]).encode()
    data = tar(*members, file("c.json", config), file("manifest.json", manifest))
    assert refusal_of(store, save(tmp_path / "saved.tar", data)) is kind


def test_a_blob_that_is_a_link_out_of_the_layout_is_not_followed(store, tmp_path):
    layout = Layout(LOWER)
    source = layout.write(tmp_path / "layout")
    blob = source / "blobs" / layout.manifest["layers"][0]["digest"].replace(":", "/")
    blob.rename(tmp_path / "outside")
    blob.symlink_to(tmp_path / "outside")
    assert refusal_of(store, source) is Refusal.TRAVERSAL


# -- packed layers ----------------------------------------------------------------------------------------------------


def unpack(data: bytes, *, ratio: int = 250) -> bytes:
    with unpacked(io.BytesIO(data), ratio=ratio) as stream:
        return b"".join(iter(lambda: stream.read(100_000), b""))


def test_gzip_in_several_members_and_with_padding_is_whole():
    assert unpack(gzip.compress(b"a" * 300_000) + gzip.compress(b"b") + bytes(100)) == b"a" * 300_000 + b"b"
    assert unpack(b"plain") == b"plain"
    assert unpack(b"") == b""


@pytest.mark.parametrize("cut", [5, 20, -9, -1])
def test_gzip_that_was_cut_off_is_truncated(cut):
    with pytest.raises(ImageError) as caught:
        unpack(gzip.compress(os.urandom(1000))[:cut])
    assert caught.value.reason == Refusal.TRUNCATED.value


@pytest.mark.parametrize("at", [12, -6])
def test_gzip_that_was_changed_is_refused(at):
    data = bytearray(gzip.compress(b"text" * 100))
    data[at] ^= 0xFF
    with pytest.raises(ImageError) as caught:
        unpack(bytes(data))
    assert caught.value.reason in (Refusal.MALFORMED.value, Refusal.TRUNCATED.value)


def test_a_bomb_is_stopped_while_it_goes_off(monkeypatch):
    monkeypatch.setattr(compression, "_FREE_BYTES", 100_000)
    data = gzip.compress(bytes(3_000_000))
    assert len(unpack(data, ratio=2000)) == 3_000_000
    with pytest.raises(ImageError, match="10 for each is the most") as caught:
        unpack(data, ratio=10)
    assert caught.value.reason == Refusal.BOMB.value


def test_a_bomb_in_a_layer_and_in_an_archive_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "_FREE_BYTES", 10_000)
    store = new_store(tmp_path / "store", limits=small(ratio=10))
    bomb = tar(file("zeros", bytes(2_000_000)))
    assert refusal_of(store, Layout(bomb).write(tmp_path / "layout")) is Refusal.BOMB
    assert refusal_of(store, save(tmp_path / "bomb.tgz", gzip.compress(bomb))) is Refusal.BOMB
    assert list(store.layout.part("tmp").iterdir()) == []


def test_a_packed_archive_above_the_limit_of_the_image_is_refused_before_it_fills_the_disk(tmp_path):
    store = new_store(tmp_path / "store", limits=small(total_bytes=5000))
    source = save(tmp_path / "big.tgz", gzip.compress(tar(file("big", os.urandom(9000)))))
    assert refusal_of(store, source) is Refusal.TOO_LARGE


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.fixture(params=["package", "program"])
def zstd_reader(request, monkeypatch):
    if request.param == "program":
        if shutil.which("zstd") is None:
            pytest.skip("the program zstd is not installed")
        monkeypatch.setitem(sys.modules, "zstandard", None)


@pytest.mark.usefixtures("zstd_reader")
def test_zstd_is_read_by_the_package_or_else_by_the_program(store, tmp_path):
    packed = zstd(LOWER)
    assert unpack(packed) == LOWER
    layout = Layout(LOWER, packed=False)
    media = "application/vnd.oci.image.layer.v1.tar+zstd"
    layout.manifest["layers"] = [{"mediaType": media, **layout.blob(packed)}]
    assert add(store, layout.write(tmp_path / "layout")).layers == 1


@pytest.mark.usefixtures("zstd_reader")
def test_zstd_in_several_frames_some_of_them_skippable_is_whole():
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"hello"
    noise = os.urandom(300_000)
    assert unpack(zstd(noise) + skippable + zstd(b"b") + skippable) == noise + b"b"


@pytest.mark.usefixtures("zstd_reader")
@pytest.mark.parametrize("cut", [5, 20, -9, -1])
def test_zstd_that_was_cut_off_or_is_damaged_is_refused(cut):
    noise = os.urandom(1000)
    for data in (zstd(noise)[:cut], zstd(noise) + zstd(noise)[:cut], zstd(noise) + b"no frame"):
        with pytest.raises(ImageError) as caught:
            unpack(data)
        assert caught.value.reason in (Refusal.MALFORMED.value, Refusal.TRUNCATED.value)


@pytest.mark.usefixtures("zstd_reader")
def test_a_bomb_of_zstd_is_stopped_while_it_goes_off(monkeypatch):
    monkeypatch.setattr(compression, "_FREE_BYTES", 100_000)
    data = zstd(bytes(30_000_000))
    assert len(unpack(data, ratio=100_000)) == 30_000_000
    with pytest.raises(ImageError, match="10 for each is the most") as caught:
        unpack(data, ratio=10)
    assert caught.value.reason == Refusal.BOMB.value


def test_zstd_without_package_and_program_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(compression.shutil, "which", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"rollmill\[images\]"):
        unpack(b"\x28\xb5\x2f\xfd" + bytes(20))


# -- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_that_did_not_change_is_the_same_image_and_its_name_says_which(store, tmp_path):
    (tmp_path / "root/a").mkdir(parents=True)
    save(tmp_path / "root/a/f", b"1")
    one = add(store, tmp_path / "root")
    assert add(store, tmp_path / "root").digest == one.digest
    save(tmp_path / "root/a/f", b"2")
    assert add(store, tmp_path / "root").digest != one.digest
    assert len(store.images()) == 2  # the old one has lost its name, not its layers


def test_the_order_of_a_directory_and_its_place_do_not_matter(store, tmp_path):
    for place, names in (("one", "abc"), ("two", "cba")):
        (tmp_path / place).mkdir()
        for name in names:
            save(tmp_path / place / name, name.encode())
            os.utime(tmp_path / place / name, (1, 1))
        os.utime(tmp_path / place, (2, 2))
    assert add(store, tmp_path / "one").digest == add(store, tmp_path / "two", name="two").digest


def test_links_out_of_a_directory_are_kept_as_links_and_hard_links_stay_one_file(store, tmp_path):
    (tmp_path / "root").mkdir()
    save(tmp_path / "secret", b"secret")
    (tmp_path / "root/l").symlink_to(tmp_path / "secret")
    save(tmp_path / "root/a", b"x" * 5000)
    os.link(tmp_path / "root/a", tmp_path / "root/b")
    add(store, tmp_path / "root")
    (tree,) = trees(store)
    assert (tree / "l").is_symlink()
    assert (tree / "a").stat().st_ino == (tree / "b").stat().st_ino
    assert not any(path.read_bytes() == b"secret" for path in files_of(store))


def test_a_name_that_would_hide_others_in_a_layer_is_refused(store, tmp_path):
    (tmp_path / "root").mkdir()
    save(tmp_path / "root/.wh.x", b"")
    assert refusal_of(store, tmp_path / "root") is Refusal.NAME


def test_sockets_of_a_directory_are_left_out_and_counted(store, tmp_path):
    (tmp_path / "root").mkdir()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "root/s"))
        image = add(store, tmp_path / "root")
    assert image.notes == ("1 sockets left out",)
    assert list(trees(store)[0].iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_devices_of_a_directory_are_refused(store, tmp_path):
    (tmp_path / "root").mkdir()
    os.mknod(tmp_path / "root/null", 0o20666, os.makedev(1, 3))
    assert refusal_of(store, tmp_path / "root") is Refusal.DEVICE


def test_a_file_that_grows_while_it_is_read_is_refused(store, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    path = save(tmp_path / "root/f", b"x" * 10)
    before = canonical.FileContent.__init__

    def grow(self: Any, *args: Any, **options: Any) -> None:
        before(self, *args, **options)
        path.write_bytes(b"x" * 11)

    monkeypatch.setattr(canonical.FileContent, "__init__", grow)
    assert refusal_of(store, tmp_path / "root") is Refusal.CHANGED


def test_the_standard_library_unpacks_our_canonical_archive_alike(store):
    data = tar(directory("d"), file("d/f", b"x"), link("l", "d/f"))
    add_tars(store, data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["d", "d/f", "l"]


# -- bootstraps -------------------------------------------------------------------------------------------------------


def test_a_bootstrap_without_a_program_says_what_to_install(store, monkeypatch):
    monkeypatch.setattr(debian.shutil, "which", lambda _: None)
    with pytest.raises(ImageError, match=r"mmdebstrap or debootstrap.*apt-get install mmdebstrap"):
        add(store, "debian:bookworm")


@pytest.mark.parametrize("suite", ["", "--hook=x", "a b", "../x"])
def test_a_suite_that_could_be_an_option_is_refused(store, suite):
    assert refusal_of(store, f"debian:{suite}") is Refusal.NAME


def test_what_a_bootstrap_writes_becomes_an_image_and_its_failure_is_told(store, tmp_path, monkeypatch):
    save(tmp_path / "made.tar", tar(directory("dev"), device("dev/null"), file("etc/debian_version", b"12")))
    program = tmp_path / "mmdebstrap"
    check = '[ "$3" = bookworm ] || { echo no such suite; exit 3; }'
    program.write_text(f'#!/bin/sh\n{check}\ncp {tmp_path}/made.tar "$4"\n', encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setattr(debian.shutil, "which", lambda name: str(program) if name == "mmdebstrap" else None)
    assert add(store, "debian:bookworm").layers == 1
    with pytest.raises(ImageError, match="ended with 3: no such suite") as caught:
        add(store, "debian:other", name="other")
    assert caught.value.reason == Refusal.BOOTSTRAP.value


def test_a_layer_that_is_there_is_not_read_again(store):
    add_tars(store, LOWER)

    def never() -> Any:
        raise AssertionError("the layer was opened")

    source = archive_layer(b"", content=digest_of(LOWER))
    source._open = never
    image = store.add_image([source], name="again", source="test", work=new_work(store))
    assert image.names == ("again", "image")
