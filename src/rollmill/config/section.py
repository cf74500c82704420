"""What every table of the configuration is made of: a frozen section, and fields that say what moving them does.

Pure; no torch.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def knob(default: Any, *, unit: str = "", raising: str = "", lowering: str = "", **constraints: Any) -> Any:
    """Return a field with its unit and the effect of moving it, for `config explain`."""
    extra: dict[str, Any] = {"unit": unit, "raising": raising, "lowering": lowering}
    return Field(default, json_schema_extra=extra, **constraints)


class Section(BaseModel):
    """A frozen table of settings; unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
