"""What a caller is told that got no sandbox: what it waited for, the numbers, the likely cause, the next action."""

from __future__ import annotations

from collections.abc import Callable

from rollmill.sandboxes.admission.books import Books
from rollmill.sandboxes.admission.gates import Gates
from rollmill.sandboxes.admission.queueing import Ask
from rollmill.sandboxes.admission.records import Place, Waiting
from rollmill.sandboxes.admission.settings import AdmissionSettings

_MIB = 1024**2


class Words:
    """Explains waits with the numbers of one pool."""

    def __init__(self, settings: AdmissionSettings, *, books: Books, gates: Gates) -> None:
        self._settings, self._books, self._gates = settings, books, gates

    def late(self, ask: Ask, waiting: Waiting, *, position: int, now_s: float) -> str:
        """Return the message of a wait that reached its deadline."""
        place = f" (number {position} of those who wait)" if position else ""
        return f"no sandbox within {ask.expires_s - ask.arrived_s:.3g} s{place}: {self.why(waiting, ask, now_s=now_s)}"

    def hopeless(self, ask: Ask, waiting: Waiting, *, opens_s: float, now_s: float) -> str:
        """Return the message of a refusal at once: what it waits for comes after its deadline."""
        left = f"in {opens_s - now_s:.3g} s, and the caller waits for {ask.expires_s - now_s:.3g} s only"
        return f"refused at once, because the next start can be {left}: {self.why(waiting, ask, now_s=now_s)}"

    def why(self, waiting: Waiting, ask: Ask, *, now_s: float) -> str:
        """Return what is waited for, its likely cause, and what to do."""
        return _WORDS[waiting](self, ask, now_s)

    def _alive(self) -> str:
        count, stopping = self._books.count, self._books.stopping
        parts = [f"{count[place]} {place.value}" for place in Place if count[place]]
        return f"{', '.join(parts) or 'none'} of which {stopping} are being killed" if stopping else ", ".join(parts)

    def _budget(self, name: str, ask: Ask) -> str:
        bound, held, need = getattr(self._settings, name), self._books.held(name), getattr(ask.needs, name)
        unit, scale = ("MiB", _MIB) if name.endswith("bytes") else ("", 1)
        numbers = f"{held / scale:.4g} of {bound / scale:.4g} {unit}".rstrip()
        return (
            f"the {name} budget is full, {numbers} held by {self._alive()}, and this one may take {need / scale:.4g}. "
            f"Release sandboxes, give them smaller limits.{name}, or raise admission.{name}."
        )

    def _turn(self, _: Ask, now_s: float) -> str:
        return f"those before it had their turn first; {self._alive()}. Ask for fewer at a time, or wait longer."

    def _starting(self, _: Ask, now_s: float) -> str:
        gates, books = self._gates, self._books
        slowed = f" under pressure ({gates.verdict.cause})" if gates.verdict.cause else ""
        return (
            f"{books.starting} start now and {gates.limit} may{slowed}; the cap follows how fast starts are "
            f"({gates.cap.value:.3g} of {self._settings.max_starting}). Give demand() earlier, so that they are ready, "
            "or wait longer."
        )

    def _running(self, _: Ask, now_s: float) -> str:
        return (
            f"the budget of {self._settings.max_running} that are not suspended is full: {self._alive()}. Are ended "
            "ones released? Otherwise run fewer rollouts, or raise admission.max_running."
        )

    def _hold(self, _: Ask, now_s: float) -> str:
        left_s = max(0.0, self._gates.hold_until_s - now_s)
        return (
            f"the provider had no room and asked for a rest, {left_s:.3g} s of it left. Its account or its node is "
            "full: run fewer sandboxes, or raise its limit."
        )

    def _breaker(self, _: Ask, now_s: float) -> str:
        breaker = self._gates.provider
        left_s = max(0.0, breaker.reopens_s - now_s)
        return (
            f"{breaker.failures} starts in a row failed and the provider is left alone, for {left_s:.3g} s more, then "
            "asked once. See the errors of those starts; `rollmill sandbox doctor` looks at this machine's backends."
        )

    def _image(self, ask: Ask, now_s: float) -> str:
        breaker = self._gates.images.get(ask.spec.image)
        failures = 0 if breaker is None else breaker.failures
        return f"the image failed {failures} times in a row and is left alone for a while: {ask.spec.image}. Mend it."

    def _pressure(self, _: Ask, now_s: float) -> str:
        cause = self._gates.verdict.cause
        return f"the node is under pressure: {cause}. End something on it, or raise admission.pressure."

    def _stopped(self, _: Ask, now_s: float) -> str:
        return f"admission is stopped: {self._gates.stopped}. It goes on by itself when that is over."

    def _creation(self, _: Ask, now_s: float) -> str:
        return (
            f"its sandbox was starting, or being checked, and was not ready in time; {self._books.starting} start now. "
            "The provider is slow: wait longer, start fewer at a time, or prepare the image ahead. What was begun is "
            "removed."
        )


_WORDS: dict[Waiting, Callable[[Words, Ask, float], str]] = {
    Waiting.TURN: Words._turn,
    Waiting.STARTING_CAP: Words._starting,
    Waiting.RUNNING: Words._running,
    Waiting.MEMORY: lambda words, ask, _: words._budget("memory_bytes", ask),
    Waiting.CPUS: lambda words, ask, _: words._budget("cpus", ask),
    Waiting.DISK: lambda words, ask, _: words._budget("disk_bytes", ask),
    Waiting.INODES: lambda words, ask, _: words._budget("inodes", ask),
    Waiting.HOLD: Words._hold,
    Waiting.BREAKER: Words._breaker,
    Waiting.IMAGE_BREAKER: Words._image,
    Waiting.PRESSURE: Words._pressure,
    Waiting.STOPPED: Words._stopped,
    Waiting.CREATION: Words._creation,
}
