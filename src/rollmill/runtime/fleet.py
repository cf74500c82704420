"""A fleet that the run does not start: replicas behind a router, or one that is served alone, found by its address.

Decides what a status means for this run (`standing_of`, pure) and proves that the fleet serves this run's weights. It
neither starts nor ends anything: who runs the fleet does.

    Waits for            Woken by    Gives up after
    a status             reply       the client's control deadline
    an update            replies     fleet.load_deadline_s
    a request            reply       its own deadline
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollmill.config.fleet import FleetSettings
from rollmill.errors import WeightMismatch
from rollmill.generator.client import GeneratorClient
from rollmill.generator.security import TlsFiles, read_token
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import FleetMember, LoadReport, ReplicaStatus
from rollmill.types import GenerateRequest, Turn

FLEET = "fleet"
"""Name under which a fleet stands in the rotation, in place of replicas."""
_SERVING = "serving"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet is to one run.

    Attributes:
        slots: rollouts that it can run at once; 0 if none of its replicas serves this run.
        policy_version: the oldest version that a replica serves to this run; 0 if none does.
        why: what keeps it from serving, in words; empty if it serves.
    """

    slots: int
    policy_version: int
    why: str = ""


def standing_of(status: ReplicaStatus, *, settings: FleetSettings) -> Standing:
    """Return what a fleet's status means for a run.

    Args:
        status: of a router, or of one replica.
        settings: whose replicas count, and how many rollouts may be there.
    """
    if status.members:
        ours = [one for one in status.members if not settings.job or not one.jobs or settings.job in one.jobs]
        serving = [one for one in ours if one.state == _SERVING]
        places, versions = sum(one.places for one in serving), [one.policy_version for one in serving]
        why = "" if serving else _why_none(ours, status=status, job=settings.job)
    else:
        serves = status.state is ReplicaState.SERVING
        places, versions = (status.max_num_seqs, [status.policy_version]) if serves else (0, [])
        why = "" if serves else f"it is {status.state.value}: {status.reason or 'no reason was given'}"
    if settings.adapter:
        known = {one.name: one.policy_version for one in status.adapters}
        if settings.adapter not in known:
            places = 0
            why = why or f"no replica knows adapter {settings.adapter!r}; known are {', '.join(known) or 'none'}"
        versions = [known.get(settings.adapter, 0)]
    slots = places if settings.slots is None else min(places, settings.slots)
    return Standing(slots=slots, policy_version=min(versions, default=0) if slots else 0, why=why)


def _why_none(ours: list[FleetMember], *, status: ReplicaStatus, job: str) -> str:
    if not ours:
        return f"none of its {len(status.members)} replicas serves job {job!r}"
    said = "; ".join(f"{one.replica} is {one.state}" + (f" ({one.reason})" if one.reason else "") for one in ours[:4])
    return f"none of its {len(ours)} replicas serves: {said}" + ("; ..." if len(ours) > 4 else "")


class FleetClient:
    """A fleet as the controller sees it: like the client of one replica.

    Every request and every update says whose it is; ids and group keys of a run are its own, for other runs have the
    same. A request asks for weights no older than those of the last update, so that a replica that kept older ones is
    asked for nothing.

    Args:
        settings: where the fleet is.
        digest_of: policy version -> digest of the weights that this run published under it.

    Attributes:
        settings: where the fleet is, and whose requests these are.

    Raises:
        ConfigError: if the token's file or a TLS file cannot be used.
    """

    def __init__(self, settings: FleetSettings, *, digest_of: Callable[[int], str]) -> None:
        self.settings = settings
        self._digest_of = digest_of
        self._loaded = 0
        self._mark = secrets.token_hex(4)
        self._room = contextlib.nullcontext() if settings.slots is None else asyncio.Semaphore(settings.slots)
        self._client = GeneratorClient(
            settings.address,
            token=None if settings.token_file is None else read_token(settings.token_file),
            tls=_tls_of(settings),
        )

    async def generate(self, request: GenerateRequest) -> Turn:
        """Return the turn, see `GeneratorClient.generate`; what is more than `fleet.slots` waits for a place here."""
        async with self._room:
            turn = await self._client.generate(self._as_asked(request))
        return msgspec.structs.replace(turn, request_id=request.request_id)

    def _as_asked(self, request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(
            request,
            request_id=f"{self._mark}/{request.request_id}",
            group_key=f"{self._mark}/{request.group_key}" if request.group_key else "",
            job=self.settings.job,
            adapter=self.settings.adapter,
            min_policy_version=max(request.min_policy_version, self._loaded),
        )

    async def load_weights(self, policy_version: int, *, deadline_s: float) -> LoadReport:
        """Have the fleet serve a version, and see that it is this run's.

        Raises:
            WeightMismatch: if it serves other weights under that number: it follows another run's repository.
            RollmillError: as `GeneratorClient.load_weights`, with what became of each replica if none loaded it.
        """
        settings = self.settings
        report = await self._client.load_weights(
            policy_version,
            deadline_s=max(deadline_s, settings.load_deadline_s),
            adapter=settings.adapter,
            job=settings.job,
        )
        published = self._digest_of(policy_version)
        if report.digest != published:
            raise WeightMismatch(
                f"the fleet at {settings.address} loaded policy version {policy_version} of another run. Start its "
                "replicas with --repository (or --adapter NAME=) and this run's directory",
                published=published,
                served=report.digest,
            )
        self._loaded = policy_version
        return report

    async def status(self) -> ReplicaStatus:
        """Return the fleet's status with the figures that count for this run; 0 slots if it serves nothing to it."""
        status = await self._client.status()
        standing = standing_of(status, settings=self.settings)
        return msgspec.structs.replace(
            status,
            max_num_seqs=standing.slots,
            policy_version=standing.policy_version,
            reason=standing.why or status.reason,
        )

    async def close(self) -> None:
        """Close the channel."""
        await self._client.close()


def _tls_of(settings: FleetSettings) -> TlsFiles | None:
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    if not settings.tls and files == (None, None, None):
        return None
    cert, key, ca = (None if name is None else Path(name) for name in files)
    return TlsFiles(cert=cert, key=key, ca=ca, server_name=settings.tls_server_name)
