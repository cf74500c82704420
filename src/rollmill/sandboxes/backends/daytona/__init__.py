"""Daytona."""

from rollmill.sandboxes.backends.daytona.driver import DaytonaProvider, DaytonaSettings

__all__ = ["DaytonaProvider", "DaytonaSettings"]
