"""Who is next: waiting requests by job, with priority classes, weights and quotas. Pure.

* Within a job requests go in order of arrival; those that want newer weights than others, or another adapter, wait in a
  lane of their own, so that they hold up nobody.
* Among jobs of one class each gets samples in proportion to its weight (start-time fair queueing): a job's `tag` grows
  by samples / weight with each sample sent, the lowest tag is next, and who was idle saved nothing up.
* A higher class goes first; a job whose first request has waited long counts as one class higher for each
  `promote_after_s`. So nobody starves: in the highest class it gets the share of its weight.
* A job at its quota waits, whatever its class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rollmill.config.router import JobSettings, RouterSettings
from rollmill.generator.router.records import Ask

_RANK = {"high": 0, "normal": 1, "low": 2}
MAX_IDLE_JOBS = 256
"""Jobs that are remembered while they ask for nothing."""


class Ticket:
    """A request that waits or runs.

    Attributes:
        on: replicas that it was sent to and whose attempt has not ended.
        excluded: replicas that it must not be sent to again.
    """

    __slots__ = ("arrived_s", "ask", "excluded", "job", "on", "waiting")

    def __init__(self, ask: Ask, *, job: JobQueue, arrived_s: float, excluded: frozenset[str]) -> None:
        self.ask = ask
        self.job = job
        self.arrived_s = arrived_s
        self.excluded = set(excluded)
        self.on: list[str] = []
        self.waiting = False


class JobQueue:
    """The waiting requests of one job, and what it has in flight.

    Attributes:
        in_flight: samples that replicas hold.
        waiting: samples that wait here.
        tag: its place among jobs of one class; the lowest is next.
    """

    def __init__(self, name: str, settings: JobSettings) -> None:
        self.name = name
        self.settings = settings
        self.in_flight = 0
        self.waiting = 0
        self.sent = 0
        self.tag = 0.0
        self._lanes: dict[tuple[int, str], deque[Ticket]] = {}

    def within_quota(self, samples: int) -> bool:
        """Return whether so many samples may be sent now; a request larger than the quota goes alone."""
        quota = self.settings.max_in_flight
        return quota is None or self.in_flight == 0 or self.in_flight + samples <= quota

    def put(self, ticket: Ticket, *, first: bool) -> None:
        """Let a request wait: at the end, or before all others if it comes back."""
        lane = self._lanes.setdefault(_lane_of(ticket.ask), deque())
        if first:
            lane.appendleft(ticket)
        else:
            lane.append(ticket)
        ticket.waiting = True
        self.waiting += ticket.ask.siblings

    def remove(self, ticket: Ticket) -> None:
        """Take a request out, wherever it stands."""
        lane = self._lanes[_lane_of(ticket.ask)]
        if lane[0] is ticket:
            lane.popleft()
        else:
            lane.remove(ticket)
        if not lane:
            del self._lanes[_lane_of(ticket.ask)]
        ticket.waiting = False
        self.waiting -= ticket.ask.siblings

    def heads(self) -> list[Ticket]:
        """Return the first request of each lane, longest waiting first."""
        if len(self._lanes) == 1:
            return [lane[0] for lane in self._lanes.values()]
        return sorted((lane[0] for lane in self._lanes.values()), key=lambda ticket: ticket.arrived_s)

    def rank(self, *, now_s: float, promote_after_s: float) -> int:
        """Return its class now, 0 the highest, with what its first request's wait has earned it."""
        waited_s = now_s - self.heads()[0].arrived_s
        return max(0, _RANK[self.settings.priority] - int(waited_s / promote_after_s))


def _lane_of(ask: Ask) -> tuple[int, str]:
    return ask.min_policy_version, ask.adapter


class JobQueues:
    """All jobs that have asked for something.

    Attributes:
        waiting: samples that wait, of all jobs.
        waves: requests among them that belong to waves, and may go where there is no room.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, JobQueue] = {}
        self._now_tag = 0.0
        self.waiting = 0
        self.waves = 0

    def __iter__(self) -> Iterator[JobQueue]:
        return iter(self._jobs.values())

    def job(self, name: str) -> JobQueue:
        """Return the queue of a job; one without a table of its own has the default's numbers."""
        queue = self._jobs.get(name)
        if queue is None:
            if len(self._jobs) >= MAX_IDLE_JOBS:
                self._jobs = {key: job for key, job in self._jobs.items() if job.in_flight or job.waiting}
            queue = self._jobs[name] = JobQueue(name, self._settings.job(name))
        return queue

    def full(self, job: JobQueue, *, samples: int) -> str | None:
        """Return why no more may wait, or `None`."""
        if self.waiting + samples > self._settings.max_queue:
            return f"{self.waiting} samples wait in the router, and max_queue is {self._settings.max_queue}"
        limit = job.settings.max_queue
        if limit is not None and job.waiting + samples > limit:
            return f"{job.waiting} samples of job {job.name!r} wait, and its max_queue is {limit}"
        return None

    def put(self, ticket: Ticket, *, first: bool = False) -> None:
        """Let a request wait."""
        ticket.job.put(ticket, first=first)
        self.waiting += ticket.ask.siblings
        self.waves += bool(ticket.ask.wave_id)

    def remove(self, ticket: Ticket) -> None:
        """Take a waiting request out."""
        ticket.job.remove(ticket)
        self.waiting -= ticket.ask.siblings
        self.waves -= bool(ticket.ask.wave_id)

    def charge(self, job: JobQueue, samples: int) -> None:
        """Samples of a job are sent: others of its class come before its next ones."""
        start = max(job.tag, self._now_tag)
        self._now_tag = start
        job.tag = start + samples / job.settings.weight
        job.in_flight += samples
        job.sent += samples

    def in_order(self, *, now_s: float) -> list[JobQueue]:
        """Return the jobs that have requests waiting, the next one first."""
        waiting = [job for job in self._jobs.values() if job.waiting]
        if len(waiting) < 2:
            return waiting
        promote_after_s, now_tag = self._settings.promote_after_s, self._now_tag
        keys = [
            (
                job.rank(now_s=now_s, promote_after_s=promote_after_s),
                max(job.tag, now_tag),
                job.heads()[0].arrived_s,
                job.name,
            )
            for job in waiting
        ]
        return [job for _, job in sorted(zip(keys, waiting, strict=True), key=lambda pair: pair[0])]
