"""Who may enter the batch when requests belong to waves.

What arithmetic gives depends on which rows share a pass, so a wave runs alone, from an empty batch, in its own order.
Decides who comes next; holds the others. First whole, first served: requests of no wave that come while a whole wave
waits stand behind it. Without waves nothing is ever held. Knows nothing of KV.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.errors import EngineError
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import Wave


class WaveGate:
    """Holds requests in front of the batch.

    Attributes:
        held: requests that may not enter yet, in order of arrival.
        wave_id: the wave that runs now, if one does.
    """

    def __init__(self) -> None:
        self.held: list[Sequence] = []
        self.wave_id: str | None = None

    def arrive(self, sequence: Sequence) -> None:
        """Take in a request.

        Raises:
            EngineError: if it contradicts what has come of its wave.
        """
        wave = sequence.request.wave
        if wave is not None:
            self._check(wave, name=sequence.request.request_id)
        self.held.append(sequence)

    def _check(self, wave: Wave, *, name: str) -> None:
        if not 0 <= wave.index < wave.size:
            raise EngineError(f"request {name} has place {wave.index} in a wave of {wave.size}; places count from 0")
        if wave.wave_id == self.wave_id:
            raise EngineError(f"request {name} comes to wave {wave.wave_id}, which was whole and runs already")
        for other in self._waves().get(wave.wave_id, ()):
            before = _wave_of(other)
            if before.size != wave.size or before.index == wave.index:
                raise EngineError(
                    f"request {name} has place {wave.index} of {wave.size} in wave {wave.wave_id}, where "
                    f"{other.request.request_id} has place {before.index} of {before.size}; a second start of a wave "
                    "needs another id"
                )

    def take(self, *, empty: bool) -> list[Sequence]:
        """Return what may enter now, in order.

        Args:
            empty: nothing runs or waits in front of the batch: the wave that ran, if one did, is over.
        """
        if empty:
            self.wave_id = None
        if self.wave_id is not None or not self.held:
            return []
        whole = self._first_whole()
        if whole is None:
            coming = [sequence for sequence in self.held if sequence.request.wave is None]
        elif empty:
            coming = sorted(whole, key=lambda sequence: _wave_of(sequence).index)
            self.wave_id = _wave_of(coming[0]).wave_id
        else:
            return []
        self.held = [sequence for sequence in self.held if sequence not in coming]
        return coming

    def overdue(self, *, now_s: float) -> list[tuple[str, EngineError]]:
        """Return the waves that are not whole although a request of theirs has waited as long as it may."""
        found: list[tuple[str, EngineError]] = []
        for wave_id, come in self._waves().items():
            late = [sequence for sequence in come if sequence.deadline_s <= now_s]
            if late:
                waited_s = now_s - late[0].arrived_s
                error = EngineError(
                    f"wave {wave_id} was held for {waited_s:.1f} s: {len(come)} of its {_wave_of(late[0]).size} "
                    f"requests have come, and request {late[0].request.request_id} may wait no longer. The controller "
                    "sends a wave at once, so some of it failed before it was sent, or an earlier wave still runs."
                )
                found.append((wave_id, error))
        return found

    def broken_by(self, ended: Iterable[Sequence]) -> list[tuple[str, EngineError]]:
        """Return the waves that lost one of these requests before its end."""
        lost = {wave.wave_id: s.request.request_id for s in ended if (wave := s.request.wave) is not None}
        return [
            (
                wave_id,
                EngineError(
                    f"request {request_id} of wave {wave_id} was aborted, so the rest of the wave would run in "
                    "another composition; it can be started again whole"
                ),
            )
            for wave_id, request_id in lost.items()
        ]

    def clear(self) -> None:
        """Forget everything."""
        self.held.clear()
        self.wave_id = None

    def _first_whole(self) -> list[Sequence] | None:
        for come in self._waves().values():
            if len(come) == _wave_of(come[0]).size:
                return come
        return None

    def _waves(self) -> dict[str, list[Sequence]]:
        found: dict[str, list[Sequence]] = {}
        for sequence in self.held:
            if sequence.request.wave is not None:
                found.setdefault(sequence.request.wave.wave_id, []).append(sequence)
        return found


def _wave_of(sequence: Sequence) -> Wave:
    wave = sequence.request.wave
    if wave is None:
        raise AssertionError("only requests of a wave are asked for their place in it")
    return wave
