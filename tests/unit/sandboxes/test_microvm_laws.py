"""What machines are made of and asked: archives, modules, command lines, requests and words, without any machine."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes import Limits, SandboxSpec
from rollmill.sandboxes.backends.firecracker import requests
from rollmill.sandboxes.backends.microvm import accelerators, disks, kit, launch, modules
from rollmill.sandboxes.backends.microvm.cpio import Archive
from rollmill.sandboxes.backends.microvm.inside import Cutter, options_of, word_of
from rollmill.sandboxes.backends.microvm.interpreter import loader_of
from rollmill.sandboxes.backends.microvm.launch import Identity
from rollmill.sandboxes.backends.microvm.provider import order
from rollmill.sandboxes.backends.microvm.templates import memory_of
from rollmill.sandboxes.backends.qemu import QemuSettings, command
from rollmill.sandboxes.backends.qemu.command import Boot, Handles, Memory
from rollmill.sandboxes.guest.frames import BadFrame, encode

MIB = 1024**2
HANDLES = Handles(control=10, agent=11, disks=(12, 13), console=14)


def entries_of(archive: bytes) -> list[tuple[str, int, bytes]]:
    """Return name, mode and content of each entry, as a kernel reads them."""
    found, at = [], 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name_end = at + 110 + fields[11]
        name = archive[at + 110 : name_end - 1].decode()
        start = name_end + -name_end % 4
        if name == "TRAILER!!!":
            return found
        found.append((name, fields[1], archive[start : start + fields[6]]))
        at = start + fields[6] + -(start + fields[6]) % 4


@settings(max_examples=30)
@given(st.dictionaries(st.text("abc/", min_size=1, max_size=12), st.binary(max_size=40), max_size=6))
def test_an_archive_gives_back_what_was_put_in(files):
    archive = Archive()
    archive.directory("d", mode=0o700)
    for name, data in files.items():
        archive.file(name, data)
    assert entries_of(archive.close()) == [("d", 0o040700, b""), *((n, 0o100644, d) for n, d in files.items())]


def test_each_module_comes_after_those_that_it_needs_and_only_once():
    text = "k/a-b.ko: k/c.ko k/d.ko\nk/c.ko: k/d.ko\nk/d.ko:\nk/e.ko: k/d.ko\n"
    known = modules.parse(text)
    assert modules.order(["a_b", "e"], modules=known, built_in="") == ["k/d.ko", "k/c.ko", "k/a-b.ko", "k/e.ko"]


def test_a_module_that_is_built_in_needs_no_loading_and_one_that_is_nowhere_is_an_error():
    assert modules.order(["virtio_pci"], modules={}, built_in="kernel/drivers/virtio/virtio_pci.ko\n") == []
    with pytest.raises(SandboxError, match="no module 'overlay'"):
        modules.order(["overlay"], modules={}, built_in="")


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=30), max_size=4), st.lists(st.integers(1, 25), min_size=1, max_size=8))
def test_frames_are_cut_whole_however_they_arrive(payloads, sizes):
    whole = [encode({"n": number}, payload) for number, payload in enumerate(payloads)]
    stream, found, cutter = b"".join(whole), [], Cutter()
    for size in itertools.cycle(sizes):
        if not stream:
            break
        found += cutter.feed(stream[:size])
        stream = stream[size:]
    assert found == whole
    assert not cutter.pending


def test_a_frame_that_has_begun_is_pending_and_one_that_is_too_large_is_refused():
    cutter = Cutter()
    assert cutter.feed(encode({"op": "x"}, b"abc")[:-1]) == []
    assert cutter.pending
    with pytest.raises(BadFrame):
        Cutter().feed(struct.pack("<II", 2**31, 0))


def test_only_what_begins_with_the_machines_word_is_for_the_machine():
    assert word_of(encode({"vm": "go", "n": 1})) == {"vm": "go", "n": 1}
    assert word_of(encode({"op": "exec", "argv": ['{"vm":']}, b'{"vm":"go"}')) is None


def test_options_are_the_words_of_this_program_alone():
    assert options_of("quiet rollmill.line=vsock rollmill.images=3 notrollmill.x=1") == {"line": "vsock", "images": "3"}


@settings(max_examples=30)
@given(st.integers(16 * MIB, 64 * 1024 * MIB))
def test_a_machine_has_room_for_the_limit_and_itself_in_steps_of_32_mib(limit):
    size = memory_of(limit, overhead_bytes=128 * MIB)
    assert size % (32 * MIB) == 0
    assert 0 <= size - limit - 128 * MIB < 32 * MIB


@settings(max_examples=30)
@given(st.integers(0, 2**40), st.integers(0, 2**20))
def test_a_disk_has_room_for_its_files_and_their_inodes(size_bytes, inodes):
    assert disks.room(size_bytes, inodes) >= size_bytes + 256 * inodes + 4 * MIB


def test_what_a_directory_takes_counts_whole_blocks_links_and_directories(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 4097)  # two blocks
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "l").symlink_to("nowhere")
    size_bytes, inodes = disks.measure(tmp_path)
    assert inodes == 4  # itself, a, d, l
    directory = (tmp_path / "d").stat().st_size
    assert size_bytes == 4096 + 2 * 4096 + -(-directory // 4096) * 4096 + 4096


def test_a_machine_that_boots_has_its_memory_in_a_file_and_a_kernel():
    words = command.machine(
        "qemu", accelerator="tcg", memory=Memory(size_bytes=256 * MIB, descriptor=9, shared=True), handles=HANDLES,
        boot=Boot(kernel=7, initrd=8), name="t",
    )  # fmt: skip
    line = " ".join(words)
    assert "memory-backend-file,id=ram,size=268435456,mem-path=/proc/self/fd/9,share=on" in line
    assert "-kernel /proc/self/fd/7 -initrd /proc/self/fd/8" in line
    assert "rollmill.line=serial rollmill.images=1" in line
    assert "-incoming" not in words
    assert HANDLES.all(Memory(size_bytes=1, descriptor=9), Boot(kernel=7, initrd=8)) == (10, 11, 12, 13, 14, 9, 7, 8)


def test_a_clone_has_the_same_devices_maps_the_memory_for_itself_and_waits():
    memory = Memory(size_bytes=256 * MIB, descriptor=9)
    booted = command.machine("qemu", accelerator="tcg", memory=memory, handles=HANDLES, boot=None, name="c")
    assert "share=off" in " ".join(booted)
    assert booted[-3:] == ["-S", "-incoming", "defer"]
    template = command.machine(
        "qemu", accelerator="tcg", memory=memory, handles=HANDLES, boot=Boot(kernel=7, initrd=8), name="t"
    )
    devices = [word for before, word in itertools.pairwise(template) if before == "-device"]
    assert devices == [word for before, word in itertools.pairwise(booted) if before == "-device"]


def test_no_machine_has_a_network_or_a_writable_disk():
    words = command.machine(
        "qemu", accelerator="kvm", memory=Memory(size_bytes=MIB), handles=HANDLES, boot=None, name="c"
    )
    line = " ".join(words)
    assert not any(word in line for word in ("-netdev", "-nic", "virtio-net", "user,id"))
    assert line.count("driver=file") == line.count("read-only=on") == 2
    assert "-nodefaults" in words
    assert words[words.index("-sandbox") + 1].count("deny") == 4


def test_a_launcher_waits_dies_with_its_parent_and_gives_up_what_root_has():
    words = launch.launcher(Identity(uid=1234, groups=(99,)))
    assert words[:2] == ["sh", "-c"]
    assert words[2].startswith("read -r go || exit 1; exec")
    line = " ".join(words)
    assert "--reuid 1234 --regid 1234 --groups 99 --bounding-set=-all --inh-caps=-all" in line
    assert line.endswith("--no-new-privs --pdeathsig KILL --")
    assert "--reuid" not in " ".join(launch.launcher(None))


def test_the_order_inside_names_every_layer_and_every_limit():
    limits = Limits(memory_bytes=64 * MIB, disk_bytes=8 * MIB, inodes=900, pids=7, cpus=0.5, cpu_s=3, open_files=33)
    made = order(SandboxSpec(limits=limits), layers=2)
    assert made["plan"]["lowers"] == ["/image/0", "/image/1"]
    assert (made["plan"]["size_bytes"], made["plan"]["inodes"]) == (8 * MIB, 900)
    assert made["caps"] == {"memory_bytes": 64 * MIB, "pids": 8, "cpus": 0.5}  # one more: the agent
    assert made["plan"]["limits"] == {
        "pids": 8, "open_files": 33, "disk_bytes": 8 * MIB, "cpu_s": 3, "memory_bytes": 64 * MIB,
    }  # fmt: skip
    json.dumps(made)


def test_firecracker_is_asked_with_names_that_hold_in_every_directory():
    asked = requests.boot(memory_bytes=200 * MIB, disks=2)
    assert asked[0].body == {"vcpu_count": 1, "mem_size_mib": 200}
    assert [one.body["path_on_host"] for one in asked if one.target.startswith("/drives/")] == ["disk0", "disk1"]
    assert "rollmill.line=vsock rollmill.images=1" in asked[1].body["boot_args"]
    assert "/" not in "".join(str(value) for one in (*asked[:-1], requests.keep(), requests.load())
                              for key, value in one.body.items() if key.endswith("path"))  # fmt: skip


def test_the_newest_kernel_for_clouds_goes_before_others(tmp_path):
    names = ("vmlinuz-6.1.0-9-cloud-amd64", "vmlinuz-6.1.0-50-cloud-amd64", "vmlinuz-7.0.0-1-amd64")
    for name in names:
        (tmp_path / name).touch()
    assert max((tmp_path / name for name in names), key=kit._preference).name == names[1]
    assert kit.find_kernel(tmp_path / "nothing") is None


def test_no_kvm_is_told_with_its_reason(tmp_path):
    assert "No such file" in accelerators.why_no_kvm(device=str(tmp_path / "kvm"))
    assert "Inappropriate ioctl" in accelerators.why_no_kvm(device="/dev/null")
    assert accelerators.choose("tcg") == "tcg"
    with pytest.raises(ConfigError, match="kvm, tcg or auto"):
        QemuSettings(accelerator="xen")


@pytest.mark.parametrize(
    "wrong", [{"boot_s": 0.0}, {"end_s": float("inf")}, {"overhead_bytes": 1}, {"templates": 0}], ids=str
)
def test_settings_that_no_machine_starts_with_are_refused(wrong):
    with pytest.raises(ConfigError):
        QemuSettings(**wrong)


def test_the_loader_of_a_program_is_read_from_it_and_a_script_has_none():
    body = bytearray(64 + 56 + 6)
    body[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", body, 32, 64)
    struct.pack_into("<HH", body, 54, 56, 1)
    struct.pack_into("<IIQQQQ", body, 64, 3, 0, 120, 0, 0, 6)
    body[120:126] = b"/ld.1\0"
    assert loader_of(bytes(body)) == "/ld.1"
    body[64] = 1  # a part to be loaded, and nothing else
    assert loader_of(bytes(body)) == ""
    with pytest.raises(SandboxError, match="no 64-bit ELF"):
        loader_of(b"#!/bin/sh\n")
