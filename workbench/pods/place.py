"""`Place`: the options of a backend as a record, whose JSON form and repr hold only what is not the default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from workbench.base.record import Allowed, PathText, Record


def absolute(path: str) -> str:
    """Make a path of this machine absolute, as the keeper runs in another folder; an empty one stays."""
    return str(Path(path).expanduser().absolute()) if path else ""


LocalPath = Annotated[PathText, AfterValidator(absolute)]
Port = Annotated[int, Field(ge=1, le=65535), Allowed("a port, a whole number from 1 to 65535")]


class Place(Record):
    """A place where pods come from; it holds its options, and starts nothing when made."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form `{"kind": …, option: …}`; holds no secret."""
        return {
            "kind": self.kind,
            **self.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        }

    def __repr__(self) -> str:
        options = {name: value for name, value in self.to_dict().items() if name != "kind"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
