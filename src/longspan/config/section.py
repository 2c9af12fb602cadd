"""A section of the run file, and the types of its keys. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def as_integer(value: Any) -> Any:
    """Accept 1e3 and 1000.0 where an integer is expected."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


MAX_INT = 1 << 48  # larger counts would overflow somewhere below
Integer = Annotated[int, BeforeValidator(as_integer)]
Positive = Annotated[Integer, Field(ge=1, le=MAX_INT)]
NonNegative = Annotated[Integer, Field(ge=0, le=MAX_INT)]
Ranks = Annotated[Integer, Field(ge=-1, le=MAX_INT)]
Layers = Annotated[Integer, Field(ge=1, le=1 << 14)]
Width = Annotated[Integer, Field(ge=1, le=1 << 24)]  # of a matrix; no model is near it
Theta = Annotated[float, Field(gt=1, le=1e18)]
Integers = Annotated[tuple[Positive, ...], Field(strict=False)]  # TOML has lists, not tuples


class Section(BaseModel):
    """A table of the run file: frozen, with checked keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
