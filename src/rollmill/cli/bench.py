"""`rollmill bench generator`: put a load on a served generator and print what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollmill.cli.access import replica_tls_options, tls_files
from rollmill.cli.output import json_option, show

if TYPE_CHECKING:
    from rollmill.generator.bench import Load, Report, Target


class _Numbers(click.ParamType):
    """Several numbers with commas between."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of numbers like 1,16,64", param, ctx)
        return tuple(int(part) for part in parts)


class _Range(click.ParamType):
    """A number, or two with dots between."""

    name = "N or N..M"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        least, _, most = str(value).partition("..")
        if not least.isdigit() or not (most or least).isdigit():
            self.fail(f"{value!r} is no range like 64..128", param, ctx)
        return int(least), int(most or least)


@click.group("bench")
def bench_group() -> None:
    """Measure what is served."""


@bench_group.command("generator")
@click.option("--target", default=None, metavar="HOST:PORT", help="gRPC address of a replica or a router.")
@click.option(
    "--http", "url", default=None, metavar="URL", help="Server of OpenAI's completions: http://HOST:PORT or https://."
)
@click.option("--model", default=None, help="Name of the model in HTTP requests.")
@click.option(
    "--concurrency", type=_Numbers(), default="1,16,64", show_default=True, help="Requests in flight, one run each."
)
@click.option(
    "--groups", "group", type=int, default=8, show_default=True, help="Requests with one prompt; 1: unrelated."
)
@click.option("--prompt-tokens", type=int, default=64, show_default=True, help="Length of every prompt.")
@click.option("--new-tokens", type=_Range(), default="64..128", show_default=True, help="Length of the answers.")
@click.option("--requests", type=int, default=None, help="Requests of a run; 4 times its concurrency unless given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, lengths and samples.")
@click.option("--vocabulary", type=int, default=1000, show_default=True, help="Ids of prompts are below it.")
@click.option("--deadline-s", type=float, default=120.0, show_default=True, help="A slower request counts as an error.")
@click.option("--no-stream", is_flag=True, help="Take answers in one piece.")
@click.option("--plain", is_flag=True, help="HTTP: send the fields of OpenAI alone, for servers that know no others.")
@click.option("--token-file", type=click.Path(), default=None, help="Bearer token of the service.")
@replica_tls_options
@json_option
def generator_command(
    target: str | None,
    url: str | None,
    model: str | None,
    concurrency: tuple[int, ...],
    group: int,
    prompt_tokens: int,
    new_tokens: tuple[int, int],
    requests: int | None,
    seed: int,
    vocabulary: int,
    deadline_s: float,
    no_stream: bool,
    plain: bool,
    token_file: str | None,
    replica_tls_ca: Path | None,
    replica_tls_cert: Path | None,
    replica_tls_key: Path | None,
    as_json: bool,
) -> None:
    """Put a load on a generator and print tokens/s, latencies, KV use and errors at each concurrency.

    The first request of all is not counted. A service on the same machine shares it with this command.
    """
    import asyncio

    import msgspec

    from rollmill.generator.bench import Load, render

    token = None
    if token_file is not None:
        from rollmill.generator.security import read_token

        token = read_token(token_file)
    loads = [
        Load(
            concurrency=count,
            requests=4 * count if requests is None else requests,
            group=group,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            seed=seed + at,  # a prompt of one run must not be in the cache of the next
            vocabulary=vocabulary,
            deadline_s=deadline_s,
        )
        for at, count in enumerate(concurrency)
    ]
    shown = {"token": token, "tls": tls_files(cert=replica_tls_cert, key=replica_tls_key, ca=replica_tls_ca)}
    # Made on the loop that it is used on: the channel belongs to it.
    reports = asyncio.run(
        _measure(lambda: _target(target, url, model=model, stream=not no_stream, plain=plain, shown=shown), loads)
    )
    show([msgspec.to_builtins(report) for report in reports], text=render(reports), as_json=as_json)


def _target(
    target: str | None, url: str | None, *, model: str | None, stream: bool, plain: bool, shown: dict[str, Any]
) -> Target:
    from rollmill.errors import ConfigError
    from rollmill.generator.bench import GrpcTarget, HttpTarget

    if (target is None) == (url is None):
        raise ConfigError("give either --target HOST:PORT (gRPC) or --http http://HOST:PORT, and not both")
    if target is not None:
        return GrpcTarget(target, stream=stream, **shown)
    return HttpTarget(str(url), model=model, stream=stream, plain=plain, **shown)


async def _measure(make: Any, loads: list[Load]) -> list[Report]:
    import os

    import msgspec

    from rollmill.errors import EngineError
    from rollmill.generator.bench import measure

    target = make()
    run = os.urandom(4).hex()
    try:
        warm = msgspec.structs.replace(loads[0], concurrency=1, requests=1, seed=loads[0].seed - 1)
        first = await measure(target, warm, name=f"bench-{run}-warm")
        if first.errors:
            raise EngineError(
                f"the first request ended with {', '.join(first.errors)}; look at the service's log, its address, and "
                "whether it asks for a token"
            )
        return [await measure(target, load, name=f"bench-{run}-{at}") for at, load in enumerate(loads)]
    finally:
        await target.close()
