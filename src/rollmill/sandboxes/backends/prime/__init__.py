"""Prime sandboxes."""

from rollmill.sandboxes.backends.prime.driver import PrimeProvider, PrimeSettings

__all__ = ["PrimeProvider", "PrimeSettings"]
