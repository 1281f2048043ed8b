"""What a notebook can ask of a keeper: one record for each request, checked when it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from workbench.base.errors import RunError

__all__ = ["Close", "NewestCheckpoint", "OfRun", "Request", "Status", "Submit", "request_from"]


class Status(BaseModel):
    """How the cluster stands."""

    op: Literal["status"]


class Submit(BaseModel):
    """Carry out a job; `dry` stops before anything of it starts and answers with the command."""

    op: Literal["submit", "dry"]
    run: str
    path: Path
    job: dict[str, Any]
    pods: int | None = None


class OfRun(BaseModel):
    """Something that a run is asked, by its id."""

    op: Literal["cancel", "stop", "bring", "stacks"]
    run: str


class NewestCheckpoint(BaseModel):
    """The newest good checkpoint that the pods keep of the run in this directory."""

    op: Literal["held"]
    path: Path
    last_step: int | None = None


class Close(BaseModel):
    """End the keeper and its pods."""

    op: Literal["close"]


Request = Status | Submit | OfRun | NewestCheckpoint | Close
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="op")])


def request_from(message: Mapping[str, object]) -> Request:
    """Read a request; a RunError says what is wrong with it."""
    try:
        return _REQUESTS.validate_python(message)
    except ValidationError as error:
        problems = [f"{each['loc'][-1]}: {each['msg']}" for each in error.errors() if each["loc"]]
        if not problems:
            raise RunError(f"the keeper does not know the request {message.get('op')!r}") from error
        raise RunError(f"the request {message.get('op')!r} cannot be read: {'; '.join(problems)}") from error
