"""Define `TolerantRecord`, for JSON of another version, truncated JSON or JSON edited by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic.dataclasses import dataclass

from workbench.base.json_values import as_float, as_int

_TOLERANT = "tolerant"
Number = Annotated[float, BeforeValidator(as_float)]
Whole = Annotated[int, BeforeValidator(as_int)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TolerantRecord:
    """Base of tolerant records.

    `read` raises ValidationError if a field without a default is missing or invalid.
    """

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON form. Unknown keys are ignored, and invalid values count as missing."""
        # A key that is no text would make pydantic refuse the whole.
        known = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        return TypeAdapter(cls).validate_python(known, context=_TOLERANT)

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_default(
        cls, value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        try:
            return check(value)
        except ValidationError:
            default = next(f for f in fields(cls) if f.name == info.field_name)
            if info.context != _TOLERANT or default.default is default.default_factory is MISSING:
                raise
            return (
                default.default_factory()
                if default.default_factory is not MISSING
                else default.default
            )
