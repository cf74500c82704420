"""The contract of sandbox backends, run against SWE-ReX's own server where somebody has put it; else skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_adapters_contract import *  # noqa: F403

import adapter_rigs
from adapter_rigs import AdapterRig, adapter_rig
from sandbox_builders import RealRig
from swerex_real import open_real_swerex, why_no_swerex

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def rig(engine: RealRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    if reason := why_no_swerex():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(adapter_rigs.OPENERS, "swerex", open_real_swerex)
        with adapter_rig("swerex", engine, tmp_path_factory.mktemp("swerex")) as opened:
            yield opened
