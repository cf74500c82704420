"""Vendors' own SDKs for tests: they validate the fakes that our adapters are tested against."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

REQUIRED = "REQUIRE_VENDORS"


def required() -> bool:
    """Return whether these tests must not be left out."""
    return bool(os.environ.get(REQUIRED))


def need(module: str) -> Any:
    """Return a vendor's module; skip without it, or fail if REQUIRE_VENDORS is in the environment."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if required():
            raise
        pytest.skip(f"the vendor's SDK is not installed, `make test-vendors` has it: {error}")
