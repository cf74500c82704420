"""What a session's shell has in mind, as text: to go on in another sandbox, after a snapshot or in a fork.

A snapshot keeps files and no processes, a shell neither. So its directory, variables, functions, aliases and options
are written down by the shell itself and read by a fresh one. What it has open, its traps and its jobs are not.
"""

from __future__ import annotations

import os

import msgspec

from rollmill.errors import SandboxError
from rollmill.sandboxes.protocol import Sandbox, Session

_MOST_STATE_BYTES = 4 * 1024 * 1024
_END = "# rollmill: end of state"
# In a subshell, so that nothing of it stays. Variables that a shell makes itself are left out: most are read only.
_SAVE = r"""(
if [ -n "${BASH_VERSION-}" ]; then
  declare -p IFS 2>/dev/null
  __rollmill_options=$(set +o; shopt -p)
  IFS=$' \t\n'
  set +eux
  for __rollmill_name in $(compgen -v); do
    case $__rollmill_name in
      BASH|BASHOPTS|BASHPID|BASH_*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|HOSTTYPE|IFS|LINENO) ;;
      MACHTYPE|OPTERR|OPTIND|OSTYPE|PIPESTATUS|PPID|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|__rollmill_*) ;;
      *) declare -p "$__rollmill_name" 2>/dev/null ;;
    esac
  done
  declare -f
  alias -p
  printf 'umask %s\ncd -- %q\n%s\n' "$(umask)" "$PWD" "$__rollmill_options"
else
  export -p
  set
  echo "umask $(umask)"
  echo 'cd -- "$PWD"'
fi
echo '# rollmill: end of state'
)"""


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """What a shell had in mind.

    Attributes:
        shell: how it is started, as for `open_session`.
        script: what another one reads to have the same in mind.
    """

    shell: str
    script: bytes


async def save_session(session: Session, *, timeout_s: float = 10.0) -> SessionState:
    """Write down what a session's shell has in mind. It goes on.

    A bash gives all that the module's documentation names. Another shell gives its directory, variables and what of
    them it exports.

    Raises:
        SandboxError: if the shell does not answer, or has more in mind than 4 MiB.
    """
    asked = await session.run('echo "${BASH_VERSION:+bash}"', timeout_s=timeout_s, output_cap_bytes=_MOST_STATE_BYTES)
    told = await session.run(_SAVE, timeout_s=timeout_s, output_cap_bytes=_MOST_STATE_BYTES)
    if told.killed_by or told.truncated or not told.stdout.rstrip().endswith(_END.encode()):
        raise SandboxError(
            f"the session's shell did not say what it has in mind: {told.stdout_bytes} bytes, exit code "
            f"{told.exit_code}, {told.killed_by or 'not killed'}. Its output may lead elsewhere (exec >file), or a "
            "variable is very large."
        )
    return SessionState(shell=asked.stdout.decode("utf-8", "replace").strip() or "sh", script=told.stdout)


async def resume_session(
    sandbox: Sandbox, state: SessionState, *, user: str | None = None, timeout_s: float = 10.0
) -> Session:
    """Open a session whose shell has in mind what another one had.

    Args:
        sandbox: where; its files should be those that the other shell saw.
        state: of the other shell.
        user: as with `open_session`.
        timeout_s: for the shell to read the state.

    Raises:
        SandboxError: if it cannot be read; no session stays open.
    """
    path = f"/tmp/.session-{os.urandom(8).hex()}"
    session = await sandbox.open_session(shell=state.shell, user=user)
    try:
        await sandbox.write(path, state.script, mode=0o600, user=user)
        try:
            result = await session.run(f". {path}", timeout_s=timeout_s)
        finally:
            await sandbox.remove(path)
        if result.killed_by or not session.alive:
            raise SandboxError(
                f"a shell could not take up the state of another: {result.killed_by or 'it ended'}, exit code "
                f"{result.exit_code}, {result.stderr[-200:].decode('utf-8', 'replace')!r}"
            )
    except BaseException:
        await session.close()
        raise
    return session
