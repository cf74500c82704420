"""The live view reads files that others write, and may be killed while they do."""

from __future__ import annotations

from pathlib import Path

from rollmill.cli.view import Tail


def test_a_tail_gives_whole_lines_once_and_passes_torn_ones_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(b'{"n": 1}\n{"n": ')
    assert tail.new() == [{"n": 1}]
    with path.open("ab") as file:
        file.write(b'2}\n{"n": 3, "text": "half\n{"n": 4}\n')  # its writer was killed, and the next one ended the line
    assert tail.new() == [{"n": 2}, {"n": 4}]
    assert tail.new() == []
