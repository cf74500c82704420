"""Control groups on a made-up file tree: which hierarchies are found, what is written, what is claimed to hold."""

from pathlib import Path

import pytest

from rollmill.sandboxes.guest.cgroups import Caps, Groups, Hierarchy, discover

CAPS = Caps(memory_bytes=1000, pids=7, cpus=0.5)


def machine(tmp_path: Path, *, groups: str, mounts: list[tuple[str, str, str, str]]) -> str:
    """Write a /proc directory; a mount is (root, point, kind, options)."""
    process = tmp_path / "self"
    process.mkdir()
    (process / "cgroup").write_text(groups, encoding="ascii")
    lines = [
        f"30 25 0:27 {root} {tmp_path}{point} rw - {kind} none rw,{options}" for root, point, kind, options in mounts
    ]
    (process / "mountinfo").write_text("\n".join(["29 1 8:1 / / rw - ext4 /dev/sda rw", *lines, ""]), encoding="ascii")
    return str(process)


def test_hybrid_machines_have_one_hierarchy_per_mount_at_the_place_of_this_process(tmp_path):
    (tmp_path / "memory/own/group").mkdir(parents=True)
    for name in ("pids", "cpu", "unified", "freezer"):
        (tmp_path / name).mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("hugetlb\n", encoding="ascii")
    process = machine(
        tmp_path,
        groups="5:freezer:/\n4:pids:/\n3:memory:/own/group\n2:cpu,cpuacct:/\n0::/\n",
        mounts=[
            ("/", "/memory", "cgroup", "memory"),
            ("/", "/pids", "cgroup", "pids"),
            ("/", "/cpu", "cgroup", "cpu,cpuacct"),
            ("/", "/freezer", "cgroup", "freezer"),
            ("/", "/unified", "cgroup2", "nsdelegate"),
        ],
    )
    assert discover(process=process) == (
        Hierarchy(1, ("memory",), f"{tmp_path}/memory/own/group"),
        Hierarchy(1, ("pids",), f"{tmp_path}/pids"),
        Hierarchy(1, ("cpu", "cpuacct"), f"{tmp_path}/cpu"),
        Hierarchy(2, ("hugetlb",), f"{tmp_path}/unified"),
    )


def test_a_container_that_sees_part_of_the_tree_uses_that_part(tmp_path):
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/cgroup.controllers").write_text("cpu memory pids\n", encoding="ascii")
    process = machine(tmp_path, groups="0::/docker/abc\n", mounts=[("/docker/abc", "/cg", "cgroup2", "rw")])
    assert discover(process=process) == (Hierarchy(2, ("cpu", "memory", "pids"), f"{tmp_path}/cg"),)


def test_hierarchies_that_this_user_may_not_write_to_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "cg").mkdir()
    process = machine(tmp_path, groups="0::/\n", mounts=[("/", "/cg", "cgroup2", "rw")])
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert discover(process=process) == ()


def test_a_machine_without_cgroups_has_none(tmp_path):
    assert discover(process=str(tmp_path / "missing")) == ()


@pytest.fixture
def kernel(monkeypatch):
    """Have every new directory filled as the kernel fills that of a group."""
    files: dict[str, str] = {}
    make = __import__("os").mkdir

    def mkdir(path, mode=0o777):
        make(path, mode)
        for name, text in files.items():
            Path(path, name).write_text(text, encoding="ascii")

    monkeypatch.setattr("os.mkdir", mkdir)
    return files


def test_limits_of_version_1_are_written_and_claimed(tmp_path, kernel):
    kernel.update(dict.fromkeys(("memory.limit_in_bytes", "pids.max", "cpu.cfs_period_us", "cpu.cfs_quota_us"), ""))
    groups = Groups.planned([Hierarchy(1, ("memory", "pids", "cpu"), str(tmp_path))], name="x")
    assert groups.directories == ((1, f"{tmp_path}/rollmill/x"),)
    assert groups.create(CAPS) == ("memory", "pids", "cpu")
    group = tmp_path / "rollmill/x"
    written = {path.name: path.read_text(encoding="ascii") for path in group.iterdir()}
    assert written == {
        "memory.limit_in_bytes": "1000",
        "pids.max": "7",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
    }


def test_limits_of_version_2_are_handed_down_written_and_claimed(tmp_path, kernel):
    names = ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "cgroup.freeze", "cgroup.subtree_control")
    kernel.update({**dict.fromkeys(names, ""), "cgroup.controllers": "cpu memory pids hugetlb"})
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (tmp_path / name).write_text(kernel[name], encoding="ascii")
    groups = Groups.planned([Hierarchy(2, ("cpu", "memory", "pids"), str(tmp_path))], name="x")
    assert groups.create(CAPS) == ("memory", "pids", "cpu", "freeze")
    group = tmp_path / "rollmill/x"
    found = {name: (group / name).read_text(encoding="ascii") for name in names[:4]}
    assert found == {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "7", "cpu.max": "50000 100000"}
    # One word a write, as the kernel wants it; a plain file keeps the last.
    assert (tmp_path / "cgroup.subtree_control").read_text(encoding="ascii").startswith("+")
    assert (tmp_path / "rollmill/cgroup.subtree_control").read_text(encoding="ascii").startswith("+")


def test_what_the_machine_does_not_offer_is_not_claimed(tmp_path, kernel):
    kernel["pids.max"] = ""
    assert Groups.planned([Hierarchy(1, ("pids",), str(tmp_path))], name="x").create(CAPS) == ("pids",)
    missing = tmp_path / "missing"
    missing.write_text("a file", encoding="ascii")
    assert Groups.planned([Hierarchy(1, ("pids",), str(missing))], name="x").create(CAPS) == ()


def test_counts_are_read_where_they_are_kept(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    for group, files in (
        (one, {"memory.usage_in_bytes": "5\n", "memory.max_usage_in_bytes": "9\n", "cpuacct.usage": "3000\n",
               "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}),
        (two, {"pids.current": "4\n", "cpu.stat": "usage_usec 77\nuser_usec 1\n"}),
    ):  # fmt: skip
        group.mkdir()
        for name, text in files.items():
            (group / name).write_text(text, encoding="ascii")
    assert Groups([(1, str(one))]).usage() == {"memory_bytes": 5, "peak_memory_bytes": 9, "cpu_us": 3, "oom_kills": 2}
    assert Groups([(1, str(one)), (2, str(two))]).usage()["cpu_us"] == 77
    assert Groups([(2, str(two))]).usage() == {"pids": 4, "cpu_us": 77}
    assert Groups([(2, str(tmp_path / "gone"))]).usage() == {}


def test_groups_that_are_gone_count_as_destroyed(tmp_path):
    (tmp_path / "x").mkdir()
    groups = Groups([(1, str(tmp_path / "x")), (2, str(tmp_path / "y"))])
    assert groups.destroy()
    assert not (tmp_path / "x").exists()
    assert groups.destroy()


def test_a_group_is_frozen_where_version_2_lets_it(tmp_path):
    (tmp_path / "cgroup.freeze").write_text("0", encoding="ascii")
    assert Groups([(2, str(tmp_path))]).freeze(True)
    assert (tmp_path / "cgroup.freeze").read_text(encoding="ascii") == "1"
    assert not Groups([(1, str(tmp_path))]).freeze(True)
