"""The contract of sandbox backends, run against SWE-ReX's own server; and its own client against our fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_adapters_contract import *  # noqa: F403

import adapter_rigs
from adapter_rigs import AdapterRig, adapter_rig
from fake_swerex import TOKEN, FakeSweRex
from rollmill.sandboxes.records import HostImage
from sandbox_builders import RealRig
from swerex_real import open_real_swerex, why_no_swerex
from vendor_sdks import need, required

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def rig(engine: RealRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    if reason := why_no_swerex():
        assert not required(), reason
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(adapter_rigs.OPENERS, "swerex", open_real_swerex)
        with adapter_rig("swerex", engine, tmp_path_factory.mktemp("swerex")) as opened:
            yield opened


def test_its_own_client_runs_programs_and_moves_files_through_the_fake(engine, tmp_path):
    remote, asked = need("swerex.runtime.remote"), need("swerex.runtime.abstract")
    errors = need("swerex.exceptions")

    async def body() -> None:
        fake = FakeSweRex(engine.provider)
        await fake.server.start()
        endpoint = await fake.start(id="theirs", image=HostImage())
        runtime = remote.RemoteRuntime(host=endpoint.url, port=None, auth_token=TOKEN)
        assert (await runtime.is_alive()).is_alive
        ran = await runtime.execute(asked.Command(command=["sh", "-c", "echo out; echo err >&2; exit 3"], cwd="/tmp"))
        assert (ran.stdout, ran.stderr, ran.exit_code) == ("out\n", "err\n", 3)
        with pytest.raises(errors.CommandTimeoutError):
            await runtime.execute(asked.Command(command=["sleep", "600"], cwd="/tmp", timeout=0.2))
        (tmp_path / "f").write_text("theirs")
        await runtime.upload(asked.UploadRequest(source_path=str(tmp_path / "f"), target_path="/tmp/f"))
        await runtime.write_file(asked.WriteFileRequest(path="/tmp/g", content="more"))
        for name, content in (("f", "theirs"), ("g", "more")):
            assert (await runtime.read_file(asked.ReadFileRequest(path=f"/tmp/{name}"))).content == content
        with pytest.raises(OSError, match="missing"):
            await runtime.read_file(asked.ReadFileRequest(path="/tmp/missing"))
        await runtime.close()
        assert not (await runtime.is_alive()).is_alive
        await fake.stop(endpoint)
        await fake.server.stop()

    engine.runner.run(body())
