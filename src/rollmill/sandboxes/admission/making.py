"""One creation, the adoption of a sandbox whose creation was cut off, and a look at whether one lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollmill.errors import CreateUnknown, SandboxDead, SandboxUnsupported
from rollmill.sandboxes.lifecycle import dead_error
from rollmill.sandboxes.protocol import Provider, Sandbox

Make = Callable[[str], Awaitable[Sandbox]]

_FIRST_LOOK_S = 0.2
_LONGEST_REST_S = 5.0


async def make_or_adopt(
    provider: Provider, make: Make, *, sandbox_id: str, check_s: float, adopt_s: float
) -> tuple[Sandbox, bool]:
    """Create a sandbox; return it, and whether it was adopted after its creation was cut off.

    Raises:
        CreateUnknown: if it was cut off and the sandbox did not appear within `adopt_s`.
    """
    try:
        return await make(sandbox_id), False
    except CreateUnknown as error:
        sandbox = await _appearing(provider, sandbox_id, check_s=check_s, adopt_s=adopt_s)
        if sandbox is None:
            raise error
        return sandbox, True


async def _appearing(provider: Provider, sandbox_id: str, *, check_s: float, adopt_s: float) -> Sandbox | None:
    loop = asyncio.get_running_loop()
    until_s, rest_s = loop.time() + adopt_s, _FIRST_LOOK_S
    while True:
        try:
            sandbox = await provider.attach(sandbox_id)
        except SandboxDead:
            if loop.time() + rest_s > until_s:
                return None
        else:
            await check_alive(sandbox, limit_s=check_s)
            return sandbox
        await asyncio.sleep(rest_s)
        rest_s = min(2 * rest_s, _LONGEST_REST_S)


async def check_alive(sandbox: Sandbox, *, limit_s: float) -> None:
    """Let a sandbox say that it lives.

    Raises:
        SandboxDead: if it has ended.
        TimeoutError: if it does not answer.
    """
    if sandbox.death is not None:
        raise dead_error(sandbox.id, sandbox.death)
    try:
        async with asyncio.timeout(limit_s):
            await sandbox.usage()
    except SandboxUnsupported:
        return  # a backend that counts nothing still knows its dead
