"""Sessions of fake sandboxes: a shell of a few words, whose programs are those of the fake.

It knows `;` and new lines, quotes, `$NAME` and `$?`, `NAME=value`, `export`, `cd` and `exit`. Everything else is a
program.
"""

from __future__ import annotations

import asyncio
import os.path
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollmill.errors import SandboxBusy, SandboxError, SandboxFileError
from rollmill.sandboxes.protocol import DEFAULT_OUTPUT_CAP_BYTES, check_line
from rollmill.sandboxes.records import ExecResult
from rollmill.testing.sandbox_programs import FakeProcess

if TYPE_CHECKING:
    from rollmill.testing.fake_sandbox import FakeSandbox

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\?|[A-Za-z_][A-Za-z0-9_]*)")
_SYNTAX = 2


class FakeSession:
    """One session.

    Args:
        sandbox: whose.
        cwd: where it begins.
        env: its variables.
        user: who runs its programs.
    """

    def __init__(self, sandbox: FakeSandbox, *, cwd: str, env: Mapping[str, str], user: str | None) -> None:
        self._sandbox = sandbox
        self._cwd = cwd
        self._variables = dict(env)
        self._user = user
        self._status = 0
        self._alive = True
        self._busy = False
        self._process: FakeProcess | None = None

    @property
    def alive(self) -> bool:
        """Return whether its shell goes on."""
        return self._alive and self._sandbox.death is None

    def end(self) -> None:
        """End with its sandbox's processes."""
        self._alive = False
        if self._process is not None:
            self._process.kill("owner")

    async def run(
        self, line: str, *, timeout_s: float | None = None, output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES
    ) -> ExecResult:
        """Run a line."""
        check_line(line, timeout_s=timeout_s, output_cap_bytes=output_cap_bytes)
        self._sandbox.check()
        if not self.alive:
            raise SandboxError("the session has ended; open another session")
        if self._busy:
            raise SandboxBusy("a line of this session runs already; a session runs one at a time")
        loop = asyncio.get_running_loop()
        timeout_s = self._sandbox.spec.limits.exec_s if timeout_s is None else timeout_s
        self._busy = True
        try:
            return await self._run(line, end_s=loop.time() + timeout_s, cap_bytes=output_cap_bytes)
        finally:
            self._busy = False

    async def _run(self, line: str, *, end_s: float, cap_bytes: int) -> ExecResult:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        whole = ExecResult(exit_code=0)
        try:
            commands = _split(line)
        except ValueError as error:
            self._status = _SYNTAX
            said = f"sh: {error}\n".encode()
            return ExecResult(exit_code=_SYNTAX, stderr=said, stderr_bytes=len(said))
        for words in commands:
            left_s = end_s - loop.time()
            one = await self._command(words, left_s=left_s, cap_bytes=cap_bytes - len(whole.stdout))
            self._status = one.exit_code if one.exit_code >= 0 else 128 - one.exit_code
            whole = ExecResult(
                exit_code=self._status,
                stdout=whole.stdout + one.stdout,
                stderr=whole.stderr + one.stderr,
                killed_by=one.killed_by,
                stdout_bytes=whole.stdout_bytes + one.stdout_bytes,
                stderr_bytes=whole.stderr_bytes + one.stderr_bytes,
                wall_s=loop.time() - began_s,
            )
            if one.killed_by or not self._alive:
                break
        return whole

    async def _command(self, words: list[str], *, left_s: float, cap_bytes: int) -> ExecResult:
        words = [self._expand(one) for one in words]
        if all(_ASSIGNMENT.fullmatch(one) for one in words):
            for one in words:
                self._assign(one)
            return ExecResult(exit_code=0)
        if words[0] == "export":
            for one in words[1:]:
                self._assign(one)
            return ExecResult(exit_code=0)
        if words[0] == "exit":
            self._alive = False
            return ExecResult(exit_code=int(words[1]) if len(words) > 1 else self._status)
        if words[0] == "cd":
            return self._change(words[1] if len(words) > 1 else self._variables["HOME"])
        self._process = await self._sandbox.begin(
            words, cwd=self._cwd, env=self._variables, user=self._user, timeout_s=left_s, cap_bytes=cap_bytes
        )
        try:
            await self._process.close_stdin()
            return await self._process.wait()
        except asyncio.CancelledError:
            self._process.kill("owner")
            raise
        finally:
            self._process = None

    def _assign(self, word: str) -> None:
        if found := _ASSIGNMENT.fullmatch(word):
            self._variables[found[1]] = found[2]

    def _change(self, path: str) -> ExecResult:
        path = os.path.normpath(os.path.join(self._cwd, path))
        try:
            found = self._sandbox.tree.stat(path).kind
        except SandboxFileError:
            found = "missing"
        if found != "directory":
            said = f"sh: cd: {path}: no such directory\n".encode()
            return ExecResult(exit_code=1, stderr=said, stderr_bytes=len(said))
        self._cwd = path
        return ExecResult(exit_code=0)

    def _expand(self, word: str) -> str:
        return _VARIABLE.sub(
            lambda found: str(self._status) if found[1] == "?" else self._variables.get(found[1], ""), word
        )

    async def interrupt(self) -> None:
        """Send SIGINT to the running program."""
        if self._process is not None:
            await self._process.signal(2)

    async def close(self) -> None:
        """End the shell."""
        self.end()
        self._sandbox.closed(self)


def _split(line: str) -> list[list[str]]:
    """Return the commands of a line as words."""
    lexer = shlex.shlex(line.replace("\n", ";"), posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) == {";"}:
            commands.append([])
        else:
            commands[-1].append(word)
    return [one for one in commands if one]
