"""What gVisor's runtime is asked for, what the agent brings along, and how the runtime is built; without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes import IsolationLevel
from rollmill.sandboxes.backends.gvisor import GvisorSettings, build
from rollmill.sandboxes.backends.gvisor.presence import presence
from rollmill.sandboxes.backends.gvisor.toolbox import Found, toolbox
from rollmill.sandboxes.guest import oci

LIMITS = {"pids": 41, "open_files": 64, "disk_bytes": 1000, "cpu_s": 0, "memory_bytes": 5}


def configured(**changes):
    given = {"root": "/r", "shared_memory": "/s", "argv": ["agent"], "limits": LIMITS, "all_users": True}
    return oci.configuration(**{**given, **changes})


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


# -- the runtime's orders --------------------------------------------------------------------------------------------


def test_root_inside_has_the_capabilities_of_every_backend_and_none_to_inherit():
    process = configured()["process"]
    kept = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
    assert process["capabilities"] == {"bounding": kept, "effective": kept, "permitted": kept}
    assert process["noNewPrivileges"] is True
    assert (process["user"], process["cwd"], process["args"]) == ({"uid": 0, "gid": 0}, "/", ["agent"])


def test_limits_of_each_process_are_those_of_the_spec():
    limits = {one["type"]: (one["soft"], one["hard"]) for one in configured()["process"]["rlimits"]}
    assert limits == {
        "RLIMIT_NPROC": (41, 41),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_FSIZE": (1000, 1000),
        "RLIMIT_CORE": (0, 0),
    }


def test_shared_memory_is_a_directory_of_the_host_that_counts_it():
    mounts = {one["destination"]: one for one in configured()["mounts"]}
    assert (mounts["/dev/shm"]["type"], mounts["/dev/shm"]["source"]) == ("bind", "/s")
    assert "gid=5" in mounts["/dev/pts"]["options"]
    alone = {one["destination"]: one for one in configured(all_users=False)["mounts"]}
    assert "gid=5" not in alone["/dev/pts"]["options"]
    assert [one for one in mounts.values() if one["type"] == "bind"] == [mounts["/dev/shm"]]


def test_there_is_no_network_and_files_are_written_where_the_host_counts_them():
    flags = oci.global_flags(state="/st", platform="", log="/lo")
    assert flags == ["--root=/st", "--network=none", "--ignore-cgroups", "--overlay2=none", "--log=/lo"]
    assert oci.global_flags(state="/st", platform="systrap", log="/lo")[-1] == "--platform=systrap"


def test_the_file_of_memory_is_bounded_in_whole_gibibytes():
    gib = 1 << 30
    assert [oci.memory_file_bytes(one) for one in (1, gib, gib + 1, 5 * gib)] == [gib, gib, 2 * gib, 5 * gib]


@pytest.mark.parametrize(
    ("image", "one_user", "command"),
    [
        ("", False, ["run", "--bundle=/b", "sandbox"]),
        ("", True, ["--rootless", "run", "--bundle=/b", "sandbox"]),
        ("/i", False, ["restore", "--image-path=/i", "--bundle=/b", "sandbox"]),
    ],
)
def test_a_sandbox_starts_anew_or_from_an_image(image, one_user, command):
    assert oci.start_command(bundle="/b", image=image, one_user=one_user) == command


def test_only_three_things_are_asked_of_one_that_runs():
    assert oci.verb_command("pause", image="/i") == ["pause", "sandbox"]
    assert oci.verb_command("resume", image="/i") == ["resume", "sandbox"]
    assert oci.verb_command("checkpoint", image="/i") == ["checkpoint", "--image-path=/i", "sandbox"]
    for verb in ("kill", "exec", "--help", ""):
        with pytest.raises(ValueError, match="not asked to"):
            oci.verb_command(verb, image="/i")


def test_the_agent_runs_under_its_own_loader_or_none():
    argv = oci.agent_argv("ld.so", {"x": 1})
    assert argv[:4] == ["/.rollmill/lib/ld.so", "--library-path", "/.rollmill/lib", "/.rollmill/bin/python3"]
    assert json.loads(argv[-1]) == {"x": 1}
    assert oci.agent_argv("", {})[0] == "/.rollmill/bin/python3"


# -- what the agent brings along -------------------------------------------------------------------------------------


def test_the_interpreter_its_libraries_and_the_guest_package_are_shown_and_other_packages_are_not():
    found = Found(
        interpreter="/opt/py/bin/python3.12",
        standard="/opt/py/lib/python3.12",
        version="python3.12",
        directory="lib",
        loaded=(
            "/opt/py/lib/libpython3.12.so.1.0",
            "/lib64/ld-linux-x86-64.so.2",
            "/opt/py/lib/python3.12/lib-dynload/_ctypes.so",
            "/usr/lib/libffi.so.8",
        ),
    )
    box = toolbox(found, package="/src/guest")
    assert box.shown == (
        ("/.rollmill/bin/python3", "/opt/py/bin/python3.12"),
        ("/.rollmill/lib/python3.12", "/opt/py/lib/python3.12"),
        ("/.rollmill/src/guest", "/src/guest"),
        ("/.rollmill/lib/libpython3.12.so.1.0", "/opt/py/lib/libpython3.12.so.1.0"),
        ("/.rollmill/lib/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
        ("/.rollmill/lib/libffi.so.8", "/usr/lib/libffi.so.8"),
    )
    assert box.loader == "ld-linux-x86-64.so.2"
    assert box.hidden == ("/.rollmill/lib/python3.12/site-packages", "/.rollmill/lib/python3.12/dist-packages")
    static = toolbox(Found(**{**{n: getattr(found, n) for n in found.__struct_fields__}, "loaded": ()}), package="/g")
    assert static.loader == ""


# -- the settings ----------------------------------------------------------------------------------------------------


def test_a_runtime_that_is_named_is_taken_and_one_that_is_not_there_is_refused_with_the_way_to_get_it(tmp_path):
    runsc = program(tmp_path / "runsc")
    assert GvisorSettings(runsc=runsc).find_runsc() == runsc.resolve()
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"Install runsc.*rollmill sandbox build-runsc"):
            GvisorSettings(runsc=missing).find_runsc()


def test_the_runtime_of_the_path_goes_before_the_one_that_was_built(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    built = program(tmp_path / "cache" / "rollmill" / "gvisor" / "runsc")
    assert GvisorSettings().find_runsc() == built
    on_path = program(tmp_path / "bin" / "runsc")
    assert GvisorSettings().find_runsc() == on_path
    assert presence(GvisorSettings()) == f"is {on_path}"


def test_less_than_a_kernel_of_its_own_must_be_asked_for():
    assert GvisorSettings().minimum_isolation is IsolationLevel.OWN_KERNEL
    for name in ("runtime_bytes", "runtime_threads", "verb_s", "checkpoint_s"):
        changes: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            GvisorSettings(**changes)


# -- the build -------------------------------------------------------------------------------------------------------


def sources(path: Path) -> Path:
    (path / "gvisor.dev" / "gvisor" / "runsc").mkdir(parents=True)
    return path


def test_what_a_build_lacks_is_named_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    absent = build.missing(sources=tmp_path / "none", machine="aarch64")
    assert [one for one in absent if "aarch64" in one or "golang-gvisor-gvisor-dev" in one] == list(absent[:2])
    assert [one.split("package ")[1].rstrip(")") for one in absent[2:]] == ["golang-go", "g++", "binutils"]
    for name in ("go", "g++", "ld.bfd"):
        program(tmp_path / "bin" / name)
    assert build.missing(sources=sources(tmp_path / "src"), machine="x86_64") == ()
    with pytest.raises(SandboxError, match=r"missing: gVisor's sources.*apt-get install golang-go"):
        build.build(tmp_path / "runsc", progress=lambda _: None, sources=tmp_path / "none")


def test_the_vdso_is_linked_before_the_runtime_is_built_and_only_what_runs_is_put_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "missing", lambda **_: ())
    target = program(tmp_path / "cache" / "runsc", "old")
    seen, told = [], []

    def run(step: build.Step, work: Path) -> None:
        assert (work / "src" / "gvisor.dev" / "gvisor" / "runsc").is_dir()
        seen.append((step.argv[0], step.directory))
        if step.argv[0] == "g++":
            script = next(one for one in step.argv if one.startswith("-Wl,-T"))
            assert "0xffffffffff700000" in Path(script.removeprefix("-Wl,-T")).read_text(encoding="utf-8")
        if step.argv[0] == "go":
            assert (step.env["CGO_ENABLED"], step.env["GOPATH"]) == ("0", str(work))
            program(work / "runsc", "new")
        if "--version" in step.argv and fails:
            raise SandboxError("it does not run")

    fails = True
    with pytest.raises(SandboxError, match="does not run"):
        build.build(target, progress=told.append, sources=sources(tmp_path / "src"), run=run)
    assert target.read_text(encoding="utf-8") == "old"
    fails = False
    build.build(target, progress=told.append, sources=tmp_path / "src", run=run)
    assert target.read_text(encoding="utf-8") == "new"
    assert os.access(target, os.X_OK)
    assert [one for one, _ in seen[:2]] == ["g++", "go"]
    assert sorted(one.name for one in target.parent.iterdir()) == ["runsc"]
    assert told[1:3] == ["link the vDSO", "build runsc (about 80 processor seconds)"]


def test_a_step_that_fails_says_what_it_said_last(tmp_path):
    step = build.Step(what="try", argv=("sh", "-c", "echo first; echo no room >&2; exit 3"), env={}, directory=".")
    with pytest.raises(SandboxError, match=r"at the step 'try' \(3\): first\nno room"):
        build.run_step(step, tmp_path)
    with pytest.raises(SandboxError, match="at the step 'try'"):
        build.run_step(build.Step(what="try", argv=("no-such-program",), env={}, directory="."), tmp_path)
