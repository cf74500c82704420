"""Settings of the namespace backend that cannot work are refused."""

import pytest

from rollmill.errors import ConfigError
from rollmill.sandboxes import NamespaceSettings


def test_ranges_of_ids_go_round(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    settings = NamespaceSettings(id_base=1_000_000, id_ranges=3)
    assert [settings.id_range(n) for n in range(4)] == [1_000_000, 1_065_536, 1_131_072, 1_000_000]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert settings.id_range(0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"id_base": 0},
        {"id_base": 65_535},
        {"id_base": 2**31 - 65_536 * 2, "id_ranges": 3},
        {"id_ranges": 0},
        {"start_s": 0},
        {"end_s": -1},
        {"answer_s": float("nan")},
    ],
)
def test_values_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        NamespaceSettings(**wrong)


def test_the_largest_ids_are_allowed():
    settings = NamespaceSettings(id_base=2**31 - 65_536 * 2, id_ranges=2)
    assert settings.id_base + 2 * 65_536 == 2**31
