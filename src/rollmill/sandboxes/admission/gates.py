"""What lets a start through beside the budgets: stops, pressure, a full provider, breakers, the cap. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.sandboxes.admission.books import Claim
from rollmill.sandboxes.admission.breaker import Breaker
from rollmill.sandboxes.admission.pressure import CALM, PressureVerdict
from rollmill.sandboxes.admission.records import How, Waiting
from rollmill.sandboxes.admission.settings import AdmissionSettings
from rollmill.sandboxes.admission.starting_cap import StartingCap
from rollmill.sandboxes.records import Image

_REMEMBERED_IMAGES = 1000


class Gates:
    """All gates of one provider."""

    def __init__(self, settings: AdmissionSettings, *, cores: int) -> None:
        self._settings = settings
        self.cap = StartingCap(
            minimum=settings.min_starting,
            initial=settings.initial_starting or cores,
            maximum=settings.max_starting,
            slow_factor=settings.slow_factor,
        )
        self.provider = Breaker(failures=settings.breaker_failures, open_s=settings.breaker_open_s)
        self.images: dict[Image, Breaker] = {}
        self.verdict: PressureVerdict = CALM
        self.stopped = ""
        self.hold_until_s = 0.0
        self._holds = 0

    @property
    def limit(self) -> int:
        """Return how many may be starting now."""
        return self.cap.limit(factor=self.verdict.factor, stop=bool(self.closed_by))

    @property
    def closed_by(self) -> str:
        """Return why nothing may start or resume, empty if it may."""
        return self.stopped or (self.verdict.cause if self.verdict.stop else "")

    def why_not(self, image: Image | None, *, starting: int, now_s: float) -> Waiting | None:
        """Return what keeps a start back, `None` if nothing does.

        Args:
            image: of the sandbox; `None` for a resume, which starts nothing.
            starting: how many start now.
            now_s: time.
        """
        if self.stopped:
            return Waiting.STOPPED
        if self.verdict.stop:
            return Waiting.PRESSURE
        if image is None:
            return None
        if now_s < self.hold_until_s:
            return Waiting.HOLD
        if not self.provider.allows(now_s=now_s):
            return Waiting.BREAKER
        if (breaker := self.images.get(image)) is not None and not breaker.allows(now_s=now_s):
            return Waiting.IMAGE_BREAKER
        return Waiting.STARTING_CAP if starting >= self.limit else None

    def opens_s(self, waiting: Waiting, image: Image, *, now_s: float) -> float | None:
        """Return when a gate opens by itself, `None` if that depends on something else."""
        opens = {Waiting.HOLD: self.hold_until_s, Waiting.BREAKER: self.provider.reopens_s}.get(waiting)
        if waiting is Waiting.IMAGE_BREAKER and image in self.images:
            opens = self.images[image].reopens_s
        return opens if opens is not None and opens > now_s else None

    def began(self, claim: Claim, *, starting: int) -> None:
        """Note a start, itself counted in `starting`."""
        claim.crowded = starting >= self.limit
        claim.probes_provider = self.provider.began()
        breaker = self.images.get(claim.spec.image)
        claim.probes_image = breaker is not None and breaker.began()

    def succeeded(self, claim: Claim, *, now_s: float) -> None:
        """Note a start that gave a sandbox."""
        self._holds = 0
        self.provider.succeeded()
        self.images.pop(claim.spec.image, None)
        self.cap.succeeded(
            claim.spec, began_s=claim.born_s, took_s=now_s - claim.born_s, crowded=claim.crowded, now_s=now_s
        )

    def failed(self, claim: Claim, how: How, *, after_s: float, now_s: float) -> None:
        """Note a start that gave none."""
        if how is How.FAILED:
            self.provider.failed(now_s=now_s, probe=claim.probes_provider)
        elif claim.probes_provider:
            self.provider.undecided()
        if how is How.IMAGE:
            self._image(claim.spec.image).failed(now_s=now_s, probe=claim.probes_image)
        elif claim.probes_image and claim.spec.image in self.images:
            self.images[claim.spec.image].undecided()
        if how in (How.FAILED, How.NO_ROOM):
            news = self.cap.failed(began_s=claim.born_s, now_s=now_s)
            if how is How.NO_ROOM:
                self._hold(after_s, news=news, now_s=now_s)

    def times(self) -> Iterator[float]:
        """Yield when gates open by themselves, past times among them."""
        yield self.hold_until_s
        for breaker in (self.provider, *self.images.values()):
            if not breaker.closed:
                yield breaker.reopens_s

    def _hold(self, after_s: float, *, news: bool, now_s: float) -> None:
        # Starts that were under way together say the same thing once.
        self._holds += news
        doubled = self._settings.hold_s * 2.0 ** min(max(0, self._holds - 1), 30)
        rest_s = max(after_s, min(doubled, self._settings.max_hold_s))
        self.hold_until_s = max(self.hold_until_s, now_s + rest_s)

    def _image(self, image: Image) -> Breaker:
        if image not in self.images:
            while len(self.images) >= _REMEMBERED_IMAGES:
                self.images.pop(next(iter(self.images)))
            settings = self._settings
            self.images[image] = Breaker(failures=settings.image_failures, open_s=settings.breaker_open_s)
        return self.images[image]
