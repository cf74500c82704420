"""One sandbox of the service: what was ordered, how it stands, and what it used."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping

from rollmill.sandboxes.protocol import Sandbox
from rollmill.sandboxes.records import Record, SandboxSpec, SnapshotRef, Usage
from rollmill.sandboxes.service.accounts import Accounts
from rollmill.sandboxes.service.law import Listed, Plan, Standing
from rollmill.sandboxes.service.problems import gone
from rollmill.sandboxes.service.programs import Programs
from rollmill.sandboxes.service.watching import Watcher

_SAMPLES = 120


class Order(Record, frozen=True, kw_only=True):
    """What a caller wants created.

    Attributes:
        template: its name.
        timeout_s: life from now.
        metadata: the caller's own words.
        envs: environment of every command.
        plan: what happens at the timeout.
        key: of a call that may come twice and must make one sandbox; empty for none.
    """

    template: str
    timeout_s: float
    metadata: Mapping[str, str] = {}
    envs: Mapping[str, str] = {}
    plan: Plan = Plan()
    key: str = ""


class Sample(Record, frozen=True, kw_only=True):
    """What a sandbox used at a time."""

    wall_s: float
    usage: Usage
    cpu_pct: float


class Served:
    """One sandbox of the service.

    Attributes:
        token: opens its files and programs.
        end_s: when its timeout ends, on the loop's clock.
        end_wall_s: the same since the epoch, as it was when that was set: callers compare what they are told.
        files: what is kept of it while it is paused without its memory.
        snapshot: name under which that is or may be kept; empty for none.
        storing: whether that is being made, and the sandbox may have ended for it.
        paused_s: when it was paused the last time, on the loop's clock.
        lost: what became of its programs when only its files were kept, in words; empty if they never went so.
        lives: how often it was started; the backend's own id of it changes each time.
    """

    def __init__(self, sandbox_id: str, order: Order, *, spec: SandboxSpec, envs: Mapping[str, str]) -> None:
        self.id = sandbox_id
        self.order = order
        self.spec = spec
        self.envs = dict(envs)
        self.token = secrets.token_urlsafe(32)
        self.standing = Standing.RUNNING
        self.started_wall_s = 0.0
        self.end_s = -1.0
        self.end_wall_s = 0.0
        self.programs: Programs
        self.accounts: Accounts
        self.watchers: dict[str, Watcher] = {}
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.timer: asyncio.TimerHandle | None = None
        self.turn = asyncio.Lock()
        self.files: SnapshotRef | None = None
        self.snapshot = ""
        self.storing = False
        self.paused_s = 0.0
        self.lost = ""
        self.lives = 0
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """Return the backend's sandbox."""
        if self._sandbox is None:
            raise gone(self.id, "it is still starting")
        return self._sandbox

    def backend_id(self) -> str:
        """Return the id that the backend knows it by in its present life."""
        return self.id if not self.lives else f"{self.id}-{self.lives}"

    def last_backend_id(self) -> str:
        """Return the id of what the backend may have of it now: of its present life, or of the next one."""
        runs = self._sandbox is not None and self.files is None
        return self._sandbox.id if runs and self._sandbox is not None else self.backend_id()

    def began(self, sandbox: Sandbox, *, stall_s: float) -> None:
        """Note that it answers: a fresh start, without programs."""
        self._sandbox, self.files, self.snapshot = sandbox, None, ""
        self.programs = Programs(stall_s=stall_s, earlier=self.lost)
        self.accounts = Accounts(sandbox)
        self.watchers = {}
        self.lives += 1

    async def sample(self, wall_s: Callable[[], float]) -> tuple[Sample, ...]:
        """Look at what it uses now; return that and what was seen before. `wall_s` tells the time."""
        if self.files is not None:
            return tuple(self.samples)
        usage, now_s = await self.sandbox.usage(), wall_s()
        last = self.samples[-1] if self.samples else None
        pct = 0.0
        if last is not None and usage.cpu_s is not None and last.usage.cpu_s is not None and now_s > last.wall_s:
            pct = 100 * (usage.cpu_s - last.usage.cpu_s) / (now_s - last.wall_s)
        self.samples.append(Sample(wall_s=now_s, usage=usage, cpu_pct=max(0.0, pct)))
        return tuple(self.samples)

    def listed(self) -> Listed:
        """Return what lists filter and sort by."""
        return Listed(
            sandbox_id=self.id,
            started_s=self.started_wall_s,
            standing=self.standing,
            template=self.order.template,
            metadata=self.order.metadata,
        )
