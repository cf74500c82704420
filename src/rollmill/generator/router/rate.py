"""How fast the fleet answers, and hence when to ask again. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 0.1, 120.0
UNMEASURED_RETRY_S = 1.0


class AnswerRate:
    """Samples answered in the last half minute.

    Example:
        >>> rate = AnswerRate()
        >>> for second in range(1, 11):
        ...     rate.answered(4, now_s=float(second))
        >>> rate.per_s(now_s=11.0)
        4.0
        >>> rate.retry_after_s(80, now_s=11.0)
        20.0
    """

    def __init__(self) -> None:
        self._answers: deque[tuple[float, int]] = deque()
        self._samples = 0

    def answered(self, samples: int, *, now_s: float) -> None:
        """Count an answer."""
        answers = self._answers
        # Whole tenths of a second are enough, and keep a busy router's memory small.
        at_s = int(now_s * 10) / 10
        if answers and answers[-1][0] == at_s:
            answers[-1] = (at_s, answers[-1][1] + samples)
        else:
            answers.append((at_s, samples))
        self._samples += samples
        self._forget(now_s)

    def per_s(self, *, now_s: float) -> float | None:
        """Return samples per second since the oldest answer that counts, or `None` before there is one."""
        self._forget(now_s)
        if not self._answers:
            return None
        return self._samples / max(now_s - self._answers[0][0], 1.0)

    def retry_after_s(self, ahead: int, *, now_s: float) -> float:
        """Return when this many samples that are ahead will have been answered."""
        rate = self.per_s(now_s=now_s)
        if not rate:
            return UNMEASURED_RETRY_S
        return min(max(ahead / rate, MIN_RETRY_S), MAX_RETRY_S)

    def _forget(self, now_s: float) -> None:
        answers = self._answers
        while answers and answers[0][0] < now_s - WINDOW_S:
            self._samples -= answers.popleft()[1]
