"""The table of attacks: enough of them, each with a name of its own, and the page that shows them is of today."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from sandbox_attacks import ATTACKS, ELSEWHERE, GVISOR, USER, VERIFIER_ATTACKS, Attack, page

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs/internals/sandbox-attacks.md"
MARK = "<!-- tables -->\n"


def test_at_least_forty_run_everywhere_and_what_is_left_out_has_a_reason():
    assert len([one for one in ATTACKS if not one.left_out]) >= 40
    assert [one.name for one in ATTACKS for reason in one.left_out.values() if len(reason) < 20] == []
    assert {place for one in ATTACKS for place in (*one.left_out, *one.other)} <= {GVISOR, USER}


def test_names_are_unlike():
    names = Counter(one.name for one in (*ATTACKS, *VERIFIER_ATTACKS))
    assert [one for one, count in names.items() if count > 1] == []


@pytest.mark.parametrize("attack", [*ATTACKS, *VERIFIER_ATTACKS], ids=lambda one: one.name)
def test_the_code_is_python_and_says_something(attack):
    compile(attack.program({}), "attack", "exec")
    assert re.search(r"tell\(|in_child\(|sys.stdout.write", attack.code)


def test_what_did_not_run_or_was_not_refused_counts_as_an_escape():
    attack = Attack(name="a", kind="k", source="s", holds="h", code="", other={GVISOR: frozenset({"EIO"})})
    assert attack.escaped(["EPERM", "EACCES"]) == []
    assert attack.escaped(["EPERM", "done"]) == ["done"]
    assert attack.escaped(["EIO"]) == ["EIO"]
    assert attack.escaped(["EIO"], GVISOR) == []
    assert attack.escaped([]) == ["(said nothing)"]


def test_every_attack_with_a_test_of_its_own_is_in_the_table():
    text = (TESTS / "integration/test_sandbox_abuse.py").read_text(encoding="utf-8")
    assert set(ELSEWHERE) == set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def test_the_page_shows_the_table_of_today():
    before, mark, shown = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has no line {MARK!r}"
    told = "put what `PYTHONPATH=tests python -c 'import sandbox_attacks as a; print(a.page(), end=\"\")'` prints there"
    assert shown == "\n" + page(), told
    counts = (len(ATTACKS), len(VERIFIER_ATTACKS), len([one for one in ATTACKS if one.control]))
    assert re.search("{} attacks .* {} on .* code of {} ".format(*counts), before, re.DOTALL), counts
