"""What every group of settings has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LIVE = Field(json_schema_extra={"live": True})
"""Marks a key that may change while a run is under way."""

Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
