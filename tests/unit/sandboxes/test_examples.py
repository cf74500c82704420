"""Examples in docstrings of the pure modules do what they say."""

import doctest

import pytest

import rollmill.sandboxes.guest.frames
import rollmill.sandboxes.isolation
import rollmill.sandboxes.lifecycle
import rollmill.testing.sandboxes

MODULES = [
    rollmill.sandboxes.guest.frames,
    rollmill.sandboxes.isolation,
    rollmill.sandboxes.lifecycle,
    rollmill.testing.sandboxes,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_work(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
