"""The `rollmill` command."""

from rollmill.cli.app import main

__all__ = ["main"]
