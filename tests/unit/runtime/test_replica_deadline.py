"""How long a replica may take until it serves."""

from rollmill.config.schema import GeneratorSettings, RollmillConfig
from rollmill.config.serving import VllmSettings
from rollmill.runtime.replica_watch import REPLICA_DEADLINE_S, replica_deadline_s


def test_a_server_of_its_own_has_its_start_on_top():
    slow = VllmSettings(start_deadline_s=900.0)
    assert replica_deadline_s(RollmillConfig()) == REPLICA_DEADLINE_S == 300.0
    assert replica_deadline_s(RollmillConfig(generator=GeneratorSettings(engine="vllm", vllm=slow))) == 1200.0
