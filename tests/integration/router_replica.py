"""A replica process with the fake engine that can load weights: what a router routes to.

python router_replica.py --port N [--version V] [--seats N] [--step-s S] [--load-s S] --address-file PATH
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

from rollmill.clock import SystemClock
from rollmill.errors import WeightError
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.main import serve
from rollmill.types import WeightManifest

LAST_VERSION = 9


class Digests:
    """As much of a model repository as the fake engine needs: versions 1 to 9, each with its digest."""

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Nothing is retired here."""

    def release(self, policy_version: int, *, owner: str) -> None:
        """Nothing is held here."""

    def load(self, policy_version: int) -> dict[str, Any]:
        self.manifest(policy_version)
        return {}

    def manifest(self, policy_version: int) -> WeightManifest:
        if policy_version > LAST_VERSION:
            raise WeightError(f"policy version {policy_version} is unknown")
        return WeightManifest(
            policy_version=policy_version,
            optimizer_step=policy_version - 1,
            parent=None,
            history_id="fake",
            training_dtype="float32",
            serving_dtype="float32",
            tensors={},
            digest=f"fake-{policy_version}",
            transport="file",
            location="",
        )


async def main(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = FakeEngine(
        clock=SystemClock(),
        policy_version=args.version,
        digest=f"fake-{args.version}",
        max_num_seqs=args.seats,
        max_model_len=1000,
        latency=FakeLatency(step_s=args.step_s, stage_s=args.load_s),
    )
    await serve(
        engine=engine,
        repository=Digests(),  # type: ignore[arg-type]
        kv_policy="keep",
        address_file=args.address_file,
        port=args.port,
        stop=stop,
        load_deadline_s=20.0,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--address-file", required=True)
    asyncio.run(main(parser.parse_args()))
