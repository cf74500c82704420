"""Evidence on disk: whole files of bounded size and number, or a typed error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes import DeathReason, Limits
from rollmill.sandboxes.watchdog import DiskEvidence, Evidence, Pressure, Sample
from rollmill.sandboxes.watchdog.evidence import bounded
from rollmill.sandboxes.watchdog.records import Finding, Severity, Step


def evidence(number: int = 0, *, details: dict[str, object] | None = None, samples: int = 3) -> Evidence:
    return Evidence(
        sandbox_id=f"s{number}",
        reason=DeathReason.POLICY_INODES,
        wall_s=1_800_000_000.0 + number,
        limits=Limits(inodes=1000),
        findings=(Finding(reason=DeathReason.POLICY_INODES, severity=Severity.KILL, text="1000 of 1000 inodes"),),
        samples=tuple(Sample(at_s=float(at_s), inodes=1000) for at_s in range(samples)),
        pressure=Pressure(cpu_some=0.25),
        details={"top_cpu": [{"pid": 3, "command": "\ufffd\n\"'; rm"}]} if details is None else details,
        steps=(Step(name="freeze", wall_s=0.1, error="took more than 1 s"),),
    )


def test_a_file_holds_everything_in_words_that_any_reader_of_json_takes(tmp_path: Path):
    path = DiskEvidence(tmp_path / "evidence").write(evidence())
    assert path.name == "001800000000000-s0.json"
    found = json.loads(path.read_text())
    assert found["reason"] == "killed_by_policy_inodes"
    assert found["findings"] == [
        {"reason": "killed_by_policy_inodes", "severity": "kill", "text": "1000 of 1000 inodes"}
    ]
    assert [one["at_s"] for one in found["samples"]] == [0.0, 1.0, 2.0]
    assert found["details"]["top_cpu"][0]["command"] == "\ufffd\n\"'; rm"
    assert found["limits"]["inodes"] == 1000
    assert found["steps"][0]["error"] == "took more than 1 s"


def test_only_this_user_can_read_it(tmp_path: Path):
    path = DiskEvidence(tmp_path / "evidence").write(evidence())
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path):
    keeper = DiskEvidence(tmp_path, most_files=3)
    for number in (4, 1, 3, 0, 2):
        keeper.write(evidence(number))
    assert [path.name[-7:-5] for path in sorted(tmp_path.iterdir())] == ["s2", "s3", "s4"]


def test_what_does_not_fit_loses_details_first_then_the_oldest_samples():
    large = evidence(details={"top_cpu": ["x" * 10_000]}, samples=11)
    found = json.loads(bounded(large, most_bytes=8000))
    assert found["details"] == {"dropped": "10016 bytes were too large for this file"}
    assert [one["at_s"] for one in found["samples"]] == [float(at_s) for at_s in range(11)]
    found = json.loads(bounded(evidence(samples=1000), most_bytes=8000))
    assert 0 < len(found["samples"]) < 100
    assert found["samples"][-1]["at_s"] == 999.0
    assert found["findings"][0]["text"] == "1000 of 1000 inodes"


def test_a_directory_that_cannot_be_written_is_told_and_nothing_half_written_stays(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="evidence of the end of s0 cannot be written"):
        DiskEvidence(tmp_path / "file").write(evidence())
    keeper = DiskEvidence(tmp_path / "good")
    keeper.write(evidence(1))
    os.mkdir(tmp_path / "good" / "001800000000000-s0.json")  # where the file is to be
    with pytest.raises(SandboxError):
        keeper.write(evidence(0))
    assert [path.name for path in tmp_path.glob("good/*.tmp*")] == []


def test_an_id_that_is_no_files_name_is_refused(tmp_path: Path):
    import msgspec

    with pytest.raises(ConfigError):
        DiskEvidence(tmp_path).write(msgspec.structs.replace(evidence(), sandbox_id="../../etc/passwd"))
