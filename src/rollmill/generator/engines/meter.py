"""Where an engine's seconds go.

Keeps one current cause and switches it; decides nothing. At any moment the seconds by cause sum to the wall time
since the meter was made.
"""

from __future__ import annotations

import threading

from rollmill.clock import Clock


class SecondsMeter:
    """Seconds by cause; written by one thread, read by any.

    Example:
        >>> from rollmill.clock import VirtualClock
        >>> clock = VirtualClock()
        >>> meter = SecondsMeter(clock, cause="startup")
        >>> clock.advance(2.0)
        >>> meter.switch("decode")
        >>> clock.advance(0.5)
        >>> meter.read()
        (2.5, {'startup': 2.0, 'decode': 0.5})
    """

    def __init__(self, clock: Clock, *, cause: str) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cause = cause
        self._started_s = self._since_s = clock.now_s()
        self._seconds = {cause: 0.0}

    def switch(self, cause: str) -> None:
        """Charge the time since the last switch to the cause before, and go on with this one."""
        with self._lock:
            now_s = self._clock.now_s()
            self._seconds[self._cause] += now_s - self._since_s
            self._cause, self._since_s = cause, now_s
            self._seconds.setdefault(cause, 0.0)

    def read(self) -> tuple[float, dict[str, float]]:
        """Return (wall seconds, cause -> seconds), including the cause that is running now."""
        with self._lock:
            now_s = self._clock.now_s()
            seconds = dict(self._seconds)
            seconds[self._cause] += now_s - self._since_s
            return now_s - self._started_s, seconds
