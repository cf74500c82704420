"""A child process of the supervisor and the kernel's handle on it. Decides nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from rollmill.clock import Clock
from rollmill.runtime.handles import Handle
from rollmill.runtime.incarnation import Life
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.nursery import Birth
from rollmill.runtime.process import INCARNATION_VARIABLE, LIFE_VARIABLE, PARENT_VARIABLE, SPAWNED_VARIABLE
from rollmill.runtime.threads import process_environment


class Child:
    """A process of the run; `handle` is `None` if somebody else started it."""

    def __init__(
        self,
        name: str,
        *,
        pid: int,
        handle: Handle | None,
        life: str,
        incarnation: int,
        spawned_at_s: float,
    ) -> None:
        self.name = name
        self.pid = pid
        self.life = life
        self.incarnation = incarnation
        self.pidfd = os.pidfd_open(pid)
        self.spawned_at_s = spawned_at_s
        self.wall_s: float | None = None
        self._handle = handle

    @property
    def runs(self) -> bool:
        """Whether its end has not been seen."""
        return self.wall_s is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs."""
        if not self.runs:
            return
        if self._handle is not None:
            self._handle.send_signal(number)
            return
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            # It has ended; its pidfd says so at the next look.
            return

    def is_alive(self) -> bool:
        """Return whether it has not ended yet, seen or not."""
        return self.runs and (self._handle is None or self._handle.poll() is None)

    def end(self, *, grace_s: float, clock: Clock) -> None:
        """Tell it to stop, kill it if it does not, note its end; blocks for at most `grace_s` and the kernel's time."""
        if not self.runs:
            return
        self.send(signal.SIGTERM)
        if self._handle is not None:
            try:
                self._handle.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.send(signal.SIGKILL)
        self.reap(now_s=clock.now_s())

    def reap(self, *, now_s: float) -> int | None:
        """Note the end of the process; return its status, `None` if only its parent can know."""
        status = None if self._handle is None else self._handle.wait()
        os.close(self.pidfd)
        self.wall_s = now_s - self.spawned_at_s
        return status

    def life_until(self, now_s: float) -> Life:
        """Return its life so far."""
        return Life(
            process=self.name,
            life=self.life,
            incarnation=self.incarnation,
            spawned_at_s=self.spawned_at_s,
            wall_s=now_s - self.spawned_at_s if self.wall_s is None else self.wall_s,
        )


def spawn(
    name: str,
    *,
    layout: ProcessLayout,
    life: str,
    incarnation: int,
    threads: int,
    deterministic: bool,
    now_s: float,
) -> Child:
    """Start a process of the run.

    Args:
        incarnation: the one it is to serve.
    """
    environment = {
        **process_environment(threads=threads, deterministic=deterministic),
        **own_variables(life=life, incarnation=incarnation, now_s=now_s),
    }
    with layout.log(name).open("ab") as log:
        process = subprocess.Popen(
            command_of(name, layout.run_directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A session of its own, so that a terminal's Ctrl-C reaches the supervisor alone.
            start_new_session=True,
        )
    return Child(name, pid=process.pid, handle=process, life=life, incarnation=incarnation, spawned_at_s=now_s)


def birth_of(name: str, *, layout: ProcessLayout, life: str, incarnation: int, threads: int, now_s: float) -> Birth:
    """Return what the nursery needs to fork a process of the run that is as one that was spawned."""
    return Birth(
        name=name,
        command=command_of(name, layout.run_directory),
        arguments=[name, str(layout.run_directory)],
        environment={
            **process_environment(threads=threads, base={}),
            **own_variables(life=life, incarnation=incarnation, now_s=now_s),
        },
        log=str(layout.log(name)),
        threads=threads,
    )


def own_variables(*, life: str, incarnation: int, now_s: float) -> dict[str, str]:
    """Return the variables that tell a process about its start."""
    return {
        PARENT_VARIABLE: str(os.getpid()),
        SPAWNED_VARIABLE: repr(now_s),
        LIFE_VARIABLE: life,
        INCARNATION_VARIABLE: str(incarnation),
    }


def command_of(name: str, run_directory: Path) -> list[str]:
    """Return the command that runs a process of the run."""
    return [sys.executable, "-m", "rollmill.runtime.process", name, str(run_directory)]


def adopt(name: str, *, layout: ProcessLayout, life: str, incarnation: int, now_s: float) -> Child | None:
    """Return the replica that somebody else has started, or `None` if there is none yet."""
    pid = serving_pid(layout.address(name))
    if pid is None:
        return None
    try:
        started_s = now_s - max(0.0, time.time() - psutil.Process(pid).create_time())
        return Child(name, pid=pid, handle=None, life=life, incarnation=incarnation, spawned_at_s=started_s)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


def serving_pid(address: Path) -> int | None:
    """Return the process that serves at this address file, or `None` if nobody does."""
    try:
        pid = int(json.loads(address.read_text())["pid"])
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return pid if psutil.pid_exists(pid) else None
