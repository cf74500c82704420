"""A replica process with the fake engine, slowed down, and without weights: what an autoscaler or a router starts.

python fake_replica.py [--seats N] [--step-s S] [--fail STATUS] [--tls-cert PEM ...] --address-file PATH
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from rollmill.clock import SystemClock
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.main import serve
from rollmill.generator.security import Access, TlsFiles
from rollmill.types import WeightManifest


class NoWeights:
    """As much of a model repository as a replica needs that never loads."""

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Nothing is retired here."""

    def release(self, policy_version: int, *, owner: str) -> None:
        """Nothing is held here."""

    def manifest(self, policy_version: int) -> WeightManifest:
        return WeightManifest(
            policy_version=policy_version,
            optimizer_step=0,
            parent=None,
            history_id="fake",
            training_dtype="float32",
            serving_dtype="float32",
            tensors={},
            digest="fake-1",
            transport="file",
            location="",
        )


async def main(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = FakeEngine(clock=SystemClock(), max_num_seqs=args.seats, latency=FakeLatency(step_s=args.step_s))
    await serve(
        engine=engine,
        repository=NoWeights(),  # type: ignore[arg-type]
        kv_policy="keep",
        address_file=args.address_file,
        access=None if args.tls_cert is None else Access(tls=_tls(args)),
        stop=stop,
        load_deadline_s=5.0,
    )


def _tls(args: argparse.Namespace) -> TlsFiles:
    return TlsFiles(cert=args.tls_cert, key=args.tls_key, ca=args.tls_client_ca)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seats", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--fail", type=int)
    for name in ("cert", "key", "client-ca"):
        parser.add_argument(f"--tls-{name}", type=Path)
    parser.add_argument("--address-file", required=True)
    arguments = parser.parse_args()
    if arguments.fail is not None:
        sys.stderr.write("error [config]: there is no such model\n")
        sys.exit(arguments.fail)
    asyncio.run(main(arguments))
