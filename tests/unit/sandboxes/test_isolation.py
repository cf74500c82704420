"""The law of isolation: from protections that hold to a level, and the words for what is missing."""

import itertools

import pytest

from rollmill.errors import ConfigError, IsolationError
from rollmill.sandboxes.isolation import (
    WORDS,
    IsolationLevel,
    Protection,
    known,
    level_of,
    missing_for,
    parse_level,
    require,
)

P = Protection
NAMESPACES = {P.NAMESPACES, P.NO_NEW_PRIVILEGES, P.NO_NETWORK}
HARDENED = NAMESPACES | {P.USER_NAMESPACE, P.NO_NESTED_NAMESPACES, P.CAPABILITIES_DROPPED, P.SECCOMP}
CAPPED = HARDENED | {P.MEMORY_CAP, P.PIDS_CAP}


@pytest.mark.parametrize(
    ("protections", "level"),
    [
        (set(), IsolationLevel.NONE),
        ({P.SECCOMP, P.LANDLOCK}, IsolationLevel.NONE),
        (NAMESPACES, IsolationLevel.NAMESPACES),
        (HARDENED, IsolationLevel.HARDENED),
        (CAPPED, IsolationLevel.CAPPED),
        (CAPPED - {P.SECCOMP}, IsolationLevel.NAMESPACES),
        (CAPPED - {P.NO_NETWORK}, IsolationLevel.NONE),
        ({P.OWN_KERNEL}, IsolationLevel.OWN_KERNEL),
        ({P.VIRTUAL_MACHINE}, IsolationLevel.VIRTUAL_MACHINE),
    ],
)
def test_a_level_needs_all_of_its_protections_and_those_of_the_levels_below(protections, level):
    assert level_of(protections) is level


def test_one_protection_more_never_lowers_the_level():
    for size in range(4):
        for some in itertools.combinations(sorted(CAPPED | {P.LANDLOCK}, key=lambda one: one.value), size):
            for one in Protection:
                assert level_of({*some, one}) >= level_of(some)


@pytest.mark.parametrize("level", [one for one in IsolationLevel if one is not IsolationLevel.NONE])
def test_what_is_missing_is_what_would_reach_the_level(level):
    missing = missing_for(level, NAMESPACES)
    assert level_of(NAMESPACES | set(missing)) >= level
    if level is not IsolationLevel.NAMESPACES:
        assert missing


def test_too_little_is_refused_in_words_that_name_what_is_missing_and_how_to_get_it():
    with pytest.raises(IsolationError) as raised:
        require(IsolationLevel.CAPPED, HARDENED - {P.SECCOMP})
    text = str(raised.value)
    assert "at level namespaces" in text
    assert "at least capped" in text
    for one in (P.SECCOMP, P.MEMORY_CAP, P.PIDS_CAP):
        assert f"{one.value} ({WORDS[one][1]})" in text
    assert "no_network (" not in text


def test_enough_is_let_through_with_the_level_reached():
    assert require(IsolationLevel.HARDENED, CAPPED) is IsolationLevel.CAPPED
    assert require(IsolationLevel.NONE, set()) is IsolationLevel.NONE


def test_a_word_that_is_no_protection_protects_nothing():
    assert known(["seccomp", "magic", "pids"]) == {P.SECCOMP, P.PIDS_CAP}


def test_every_protection_is_explained():
    assert set(WORDS) == set(Protection)


def test_levels_are_read_in_any_case_and_others_refused_with_the_list():
    assert parse_level("Hardened") is IsolationLevel.HARDENED
    with pytest.raises(ConfigError, match="none, namespaces, hardened, capped, own_kernel, virtual_machine"):
        parse_level("strong")
