"""How a keeper keeps leases, and what it gives and tells. Pure."""

from __future__ import annotations

from rollmill.errors import ConfigError
from rollmill.sandboxes.leases.law import Claim, OnExpiry, Step
from rollmill.sandboxes.protocol import Sandbox
from rollmill.sandboxes.records import Record


class KeeperSettings(Record, frozen=True, kw_only=True):
    """How leases are kept.

    Attributes:
        name: of this table among the users of a provider; a label on its sandboxes. Two tables with one name would kill
            each other's sandboxes as orphans.
        provider: name of the provider in the rows.
        ttl_s: of a lease, from its start and from each renewal.
        suspended_ttl_s: of a suspended rollout.
        slack_s: the provider's own lease ends so much later: for the case that no keeper is left.
        call_s: longest that a provider may take for one call.
        grace_s: a creation may take so long before a sweep takes it for given up; above every `call_s` in use.
        keep_before_s: where a provider ends sandboxes at an age and cannot be asked for more, a sweep suspends rollouts
            as their files so long before. Above the time between two sweeps and the one that a snapshot takes.
        sweep_at_once: sandboxes that a sweep works on at a time: what hangs does not hold up the others, and what ran
            out together is suspended before the provider's own lease ends it.
        on_expiry: what a sweep does with a sandbox that runs when its lease ends: `END` it; or keep its `FILES`, or its
            `MEMORY` too, for `suspended_ttl_s`, after which that ends. Where the provider cannot, it ends.
    """

    name: str
    provider: str
    ttl_s: float = 600.0
    suspended_ttl_s: float = 3600.0
    slack_s: float = 60.0
    call_s: float = 120.0
    grace_s: float = 180.0
    keep_before_s: float = 900.0
    sweep_at_once: int = 16
    on_expiry: OnExpiry = OnExpiry.END

    def __post_init__(self) -> None:
        for field in ("ttl_s", "suspended_ttl_s", "slack_s", "call_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} of leases is {getattr(self, field)}; it must be above 0")
        if self.sweep_at_once < 1:
            raise ConfigError(f"sweep_at_once of leases is {self.sweep_at_once}; it must be 1 or more")
        if self.keep_before_s < self.call_s:
            raise ConfigError(
                f"keep_before_s of leases is {self.keep_before_s:g} and call_s {self.call_s:g}: a snapshot could still "
                "be under way when the provider ends the sandbox; raise keep_before_s"
            )
        if self.grace_s < self.call_s:
            raise ConfigError(
                f"grace_s of leases is {self.grace_s:g} and call_s {self.call_s:g}: creations that go on would be "
                "taken for given up; raise grace_s"
            )


class Held(Record, frozen=True, kw_only=True):
    """A sandbox and the right to it."""

    claim: Claim
    sandbox: Sandbox


class SweepReport(Record, frozen=True, kw_only=True):
    """What a sweep did, by id and with the reason.

    Attributes:
        adopted: of an owner that is gone; the rollout may be resumed.
        dropped: rows of which the provider has nothing.
        kept: suspended as their files, as their provider would have ended them soon.
        killed: ended, orphans and their snapshots among them.
        failed: would not end, or could not be kept, with the error; tried again later.
        renewed: left alone, as somebody changed their row in that moment.
        suspended: their lease ended while they ran; the rollout may be resumed.
    """

    adopted: tuple[Step, ...] = ()
    dropped: tuple[Step, ...] = ()
    kept: tuple[Step, ...] = ()
    killed: tuple[Step, ...] = ()
    failed: tuple[Step, ...] = ()
    renewed: tuple[Step, ...] = ()
    suspended: tuple[Step, ...] = ()


OUTCOMES = SweepReport.__struct_fields__
