"""What is asked of a generator in a measurement, and the figures that come of it. Pure."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollmill.errors import ConfigError

LOWEST_ID = 3
"""Ids below it are special in most vocabularies."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one measurement.

    Attributes:
        concurrency: requests in flight.
        requests: how many in all.
        group: as many in a row have one prompt; 1: no two have.
        prompt_tokens: length of every prompt.
        new_tokens: (least, most) tokens of an answer, evenly drawn.
        seed: of prompts, lengths and samples.
        vocabulary: ids of prompts are below it.
        deadline_s: a request that takes longer is given up.
    """

    concurrency: int
    requests: int
    group: int = 8
    prompt_tokens: int = 64
    new_tokens: tuple[int, int] = (64, 128)
    seed: int = 0
    vocabulary: int = 1000
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        least, most = self.new_tokens
        problems = [
            text
            for wrong, text in (
                (self.concurrency < 1, f"concurrency {self.concurrency} is below 1"),
                (self.requests < 1, f"{self.requests} requests are none"),
                (self.group < 1, f"groups of {self.group} have nobody in them"),
                (self.prompt_tokens < 1, f"prompts of {self.prompt_tokens} tokens are empty"),
                (not 1 <= least <= most, f"{least}..{most} new tokens is no range of 1 or more"),
                (self.vocabulary <= LOWEST_ID, f"a vocabulary of {self.vocabulary} leaves no id above {LOWEST_ID - 1}"),
                (not self.deadline_s > 0, f"a deadline of {self.deadline_s} s is over at once"),
            )
            if wrong
        ]
        if problems:
            raise ConfigError(f"this load cannot be asked for: {'; '.join(problems)}")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    new_tokens: int
    seed: int
    group_key: str
    deadline_s: float


def requests_of(load: Load, *, name: str) -> Iterator[Asked]:
    """Yield the requests of a load, the same for the same seed.

    Args:
        name: begins every id, so that two measurements of one service share none.

    Example:
        >>> load = Load(concurrency=1, requests=3, group=2, prompt_tokens=2, new_tokens=(5, 5))
        >>> [(asked.request_id, asked.new_tokens, asked.group_key) for asked in requests_of(load, name="m")]
        [('m-0', 5, 'm-g0'), ('m-1', 5, 'm-g0'), ('m-2', 5, 'm-g1')]
    """
    numbers = random.Random(load.seed)
    prompt: tuple[int, ...] = ()
    for index in range(load.requests):
        if index % load.group == 0:
            prompt = tuple(numbers.randrange(LOWEST_ID, load.vocabulary) for _ in range(load.prompt_tokens))
        yield Asked(
            request_id=f"{name}-{index}",
            prompt_ids=prompt,
            new_tokens=numbers.randint(*load.new_tokens),
            seed=numbers.getrandbits(31),
            group_key=f"{name}-g{index // load.group}" if load.group > 1 else "",
            deadline_s=load.deadline_s,
        )


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request.

    Attributes:
        tokens: new tokens that came.
        latency_s: from sending to the end.
        first_s: from sending to the first token; `None` if none came.
        error: code of the error that it ended with; `None` if it ended well.
    """

    tokens: int
    latency_s: float
    first_s: float | None = None
    error: str | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a service said of itself at a moment of the measurement."""

    running: float
    waiting: float
    kv_usage: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and tail; `None` where there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one measurement.

    Attributes:
        tokens: new tokens of all answers, those that ended with an error included.
        tokens_per_s: over the wall time from the first request to the last answer.
        latency_s, first_token_s, between_tokens_s: of the requests that ended well; the last is a request's mean.
        kv_usage_max, running_max, waiting_max: largest that was seen, looking every `LOOK_S` seconds.
        errors: code -> requests.
        client_cpu_s: of this side, which shares the machine if the service is local.
    """

    load: Load
    wall_s: float
    answered: int
    tokens: int
    tokens_per_s: float
    latency_s: Spread
    first_token_s: Spread
    between_tokens_s: Spread
    kv_usage_max: float | None
    running_max: float | None
    waiting_max: float | None
    errors: dict[str, int]
    client_cpu_s: float


def spread(values: Sequence[float]) -> Spread:
    """Return the percentiles, each a value that was seen (nearest rank).

    Example:
        >>> spread([float(n) for n in range(1, 101)])
        Spread(p50=50.0, p95=95.0, p99=99.0)
    """
    ordered = sorted(values)

    def at(share: float) -> float | None:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None

    return Spread(p50=at(0.50), p95=at(0.95), p99=at(0.99))


def report_of(
    load: Load, answers: Sequence[Answered], *, looks: Sequence[Standing], wall_s: float, cpu_s: float
) -> Report:
    """Return the figures of a measurement."""
    well = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.tokens for answer in answers)
    between = [
        (answer.latency_s - answer.first_s) / (answer.tokens - 1)
        for answer in well
        if answer.first_s is not None and answer.tokens > 1
    ]
    return Report(
        load=load,
        wall_s=wall_s,
        answered=len(well),
        tokens=tokens,
        tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
        latency_s=spread([answer.latency_s for answer in well]),
        first_token_s=spread([answer.first_s for answer in well if answer.first_s is not None]),
        between_tokens_s=spread(between),
        kv_usage_max=max((look.kv_usage for look in looks), default=None),
        running_max=max((look.running for look in looks), default=None),
        waiting_max=max((look.waiting for look in looks), default=None),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        client_cpu_s=cpu_s,
    )


_COLUMNS: Mapping[str, str] = {
    "in flight": "{r.load.concurrency}",
    "requests": "{r.answered}/{r.load.requests}",
    "tokens/s": "{r.tokens_per_s:.0f}",
    "latency p50 / p95 / p99, s": "{latency}",
    "first token p50 / p95, s": "{first}",
    "between tokens p50 / p95, ms": "{between}",
    "KV": "{kv}",
    "waiting": "{waiting}",
    "errors": "{errors}",
}


def render(reports: Sequence[Report]) -> str:
    """Return the figures as a table, one line per measurement."""
    rows = [list(_COLUMNS)] + [_row(report) for report in reports]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(report: Report) -> list[str]:
    latency, first, between = report.latency_s, report.first_token_s, report.between_tokens_s
    texts = {
        "latency": _joined(latency.p50, latency.p95, latency.p99),
        "first": _joined(first.p50, first.p95),
        "between": _joined(*(None if value is None else value * 1000 for value in (between.p50, between.p95))),
        "kv": "-" if report.kv_usage_max is None else f"{report.kv_usage_max:.0%}",
        "waiting": "-" if report.waiting_max is None else f"{report.waiting_max:.0f}",
        "errors": ", ".join(f"{count} {code}" for code, count in sorted(report.errors.items())) or "0",
    }
    return [form.format(r=report, **texts) for form in _COLUMNS.values()]


def _joined(*values: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.3g}" for value in values)
