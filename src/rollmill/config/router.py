"""Settings of `rollmill router`: its own file, because a router outlives the runs that it serves. Pure; no torch.

[router]
max_unavailable = 1

[router.jobs.main]
priority = "high"
weight = 2.0
max_in_flight = 256
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from rollmill.config.section import Section, knob
from rollmill.errors import ConfigError

Priority = Literal["high", "normal", "low"]


class JobSettings(Section):
    """What one job may take of the fleet."""

    priority: Priority = knob("normal")
    """Requests of a higher class go first; one that waited `promote_after_s` rises by a class, so none starves."""
    weight: float = knob(
        1.0, raising="a larger share when jobs of one class compete", lowering="a smaller share", gt=0, le=1000
    )
    """Share of the samples among jobs of one class that all have requests waiting."""
    max_in_flight: int | None = knob(
        None, unit="samples", raising="more of the fleet at once", lowering="leaves more to other jobs", ge=1
    )
    """Samples of this job that replicas hold at once; `None` sets no bound. More wait in the router."""
    max_queue: int | None = knob(None, unit="samples", raising="fewer refusals", lowering="shorter waits", ge=1)
    """Samples of this job that wait in the router; more are refused. `None`: `router.max_queue` alone."""


class RouterSettings(Section):
    """The router as a whole."""

    overcommit: float = knob(
        1.25, raising="replicas never idle between requests", lowering="fairer order, shorter waits in replicas", ge=1
    )
    """Samples given to a replica at once, as a multiple of its `max_num_seqs`; the rest waits here, where it can still
    go anywhere."""
    max_queue: int = knob(8192, unit="samples", raising="fewer refusals", lowering="shorter waits, less memory", ge=0)
    """Samples that wait in the router; more are refused with RESOURCE_EXHAUSTED (429) and a time to ask again."""
    max_siblings: int = knob(
        256, unit="samples", raising="larger groups in one call", lowering="smaller groups in one call", ge=1
    )
    """Samples of one call (`siblings`, `n`); the replicas have a limit of their own."""
    queue_wait_s: float = knob(
        60.0, unit="s", raising="fewer refusals while replicas are short", lowering="earlier refusals", gt=0
    )
    """Longest wait in the router, if the request's own deadline is not earlier."""
    promote_after_s: float = knob(5.0, unit="s", raising="stricter priorities", lowering="low classes wait less", gt=0)
    """A waiting request rises by a priority class each time it has waited this long."""
    session_slack: float = knob(0.5, raising="sessions keep their KV longer", lowering="load is evener", ge=0, le=10)
    """A session (or group) leaves a full replica only if another one's load is lower by more than this (1.0 is a full
    replica)."""
    max_sessions: int = knob(
        100_000, unit="sessions", raising="more memory", lowering="older sessions lose their KV", ge=1
    )
    """Sessions and groups whose replica is remembered; the longest unused is forgotten first."""
    on_loss: Literal["continue", "fail"] = knob("continue")
    """A replica is lost after a request's first token: `continue` elsewhere with the tokens so far as prompt, or `fail`
    with a typed error."""
    keep_tokens: bool = knob(False)
    """Have replies in one piece streamed by the replica, so that a lost replica loses few tokens. Costs CPU for each
    chunk. Without it such a request starts again elsewhere; nobody has seen its tokens yet."""
    chunk_tokens: int = knob(
        16, unit="tokens", raising="less CPU", lowering="fewer tokens are sampled again", ge=1, le=4096
    )
    """Tokens that a replica sends together for `keep_tokens`; what is not sent when it is lost is sampled again."""
    max_attempts: int = knob(
        4, unit="attempts", raising="survives more losses in a row", lowering="earlier errors", ge=1
    )
    """Replicas that a request is sent to, one after the other, before it fails."""
    hedge_budget: float = knob(
        0.0, unit="share of requests", raising="shorter tail, more load", lowering="less load", ge=0, le=1
    )
    """Requests that may be sent to a second replica because the first token is late; the later one is cancelled.
    0 turns hedging off. Above 0 all replies are streamed by the replicas."""
    hedge_percentile: float = knob(95.0, unit="%", raising="fewer hedges", lowering="earlier hedges", ge=50, lt=100)
    """A first token is late beyond this percentile of the last ones."""
    breaker_failures: int = knob(
        3, unit="failures in a row", raising="tolerates a flakier replica", lowering="leaves it sooner", ge=1
    )
    """Failures in a row after which a replica gets no requests for a while."""
    breaker_open_s: float = knob(2.0, unit="s", raising="fewer probes", lowering="back sooner", gt=0, le=600)
    """How long; then one request probes it, and each failed probe doubles the time, up to 16 times."""
    poll_s: float = knob(1.0, unit="s", raising="less traffic", lowering="fresher load and standing", gt=0)
    """Seconds between two looks at a replica's status."""
    status_deadline_s: float = knob(
        5.0, unit="s", raising="tolerates slower replicas", lowering="silent replicas leave sooner", gt=0
    )
    """A replica whose status takes longer is out of rotation until it answers."""
    list_s: float = knob(2.0, unit="s", raising="less traffic", lowering="joins and leaves are seen sooner", gt=0)
    """Seconds between two looks at the list of replicas (file or DNS)."""
    max_unavailable: int = knob(
        1, unit="replicas", raising="faster updates", lowering="more of the fleet serves meanwhile", ge=1
    )
    """Replicas that load weights at once."""
    load_deadline_s: float = knob(
        300.0, unit="s", raising="tolerates slower loads", lowering="a stuck load ends sooner", gt=0
    )
    """A weight load of one replica that takes longer has failed."""
    grace_s: float = knob(5.0, unit="s", raising="tolerates slower networks", lowering="earlier errors", gt=0)
    """Added to a request's deadline, so that the replica's partial reply arrives before the call ends."""
    default_job: JobSettings = knob(JobSettings())
    """Of jobs without a table of their own, and of requests that name no job."""
    jobs: dict[str, JobSettings] = knob({})
    """Table of each job, by its name."""

    @property
    def streams_upstream(self) -> bool:
        """Whether replies in one piece are streamed by the replicas."""
        return self.keep_tokens or self.hedge_budget > 0

    def job(self, name: str) -> JobSettings:
        """Return what a job may take."""
        return self.jobs.get(name, self.default_job)


def load_router_settings(path: str | Path | None, *, overrides: Sequence[str] = ()) -> RouterSettings:
    """Return the settings of a file, with `KEY=VALUE` overrides of single ones (without the `router.` before them).

    Raises:
        ConfigError: naming the key, what was found and what is valid.

    Example:
        >>> load_router_settings(None, overrides=["max_queue=16", "on_loss=fail"]).max_queue
        16
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"the router's settings {path} cannot be read: {error}. Give a TOML file") from error
        unknown = sorted(set(document) - {"router"})
        if unknown:
            raise ConfigError(f"{path} has {', '.join(unknown)}; all settings of a router stand in its table [router]")
        table = document.get("router", {})
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override} has no value; write --set KEY=VALUE, for example --set max_queue=1024")
        _put(table, key.strip().removeprefix("router.").split("."), _value(value.strip()))
    return _checked(table, where=str(path or "--set"))


def _put(table: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        table = table.setdefault(name, {})
    table[names[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word is a string
        return text


def _checked(table: Mapping[str, Any], *, where: str) -> RouterSettings:
    try:
        return RouterSettings.model_validate(table)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'router'}: {one['msg']} (got {one['input']!r})"
            for one in error.errors()[:8]
        )
        known = ", ".join(RouterSettings.model_fields)
        raise ConfigError(f"the router's settings in {where} are refused: {problems}. Known keys: {known}") from error
