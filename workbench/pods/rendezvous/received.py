"""A worker's report as it was received: nothing in it is trusted, since whoever sent it may be anybody."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from workbench.base.errors import ConfigError
from workbench.pods.hostfile import HostEntry, check_address, check_port, check_user
from workbench.pods.pod import Phase, Pod
from workbench.pods.ssh.identity import check_key_line

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("not the name of a worker")
    return name


def _check_slots(slots: int) -> int:
    return HostEntry(address="localhost", slots=slots).slots


def _check_path(text: str) -> str:
    if not (text.startswith("/") and text.isprintable() and ".." not in PurePosixPath(text).parts):
        raise ConfigError(f"{text[:80]!r} is not an absolute path")
    return text


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("it holds characters that cannot be printed")
    return text


_Path = Annotated[str, AfterValidator(_check_path)]
_Word = Annotated[str, StringConstraints(max_length=80), AfterValidator(_check_printable)]


class _Report(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, AfterValidator(_check_name)]
    address: Annotated[str, AfterValidator(check_address)]
    ssh_port: Annotated[int, AfterValidator(check_port)]
    user: Annotated[str, AfterValidator(check_user)]
    slots: Annotated[int, AfterValidator(_check_slots)]
    host_key: Annotated[str, AfterValidator(check_key_line)]
    root: _Path
    python: _Path
    versions: dict[_Word, _Word]


def decode_report(text: str) -> Pod:
    """Read a worker's report; the ConfigError names the worker and what is wrong."""
    try:
        report = _Report.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(_refusal(text, error)) from None
    return Pod(**dict(report), phase=Phase.RUNNING)


def _refusal(text: str, error: ValidationError) -> str:
    problems = {str(problem["loc"][0]) if problem["loc"] else "": problem for problem in error.errors()}
    if "" in problems:
        return f"the report is not JSON, or not an object: {problems['']['msg'][:100]}"
    if any(problem["type"] in ("missing", "extra_forbidden") for problem in problems.values()):
        return "the report has not the fields of a worker's report"
    if "name" in problems:
        return "the report has no valid worker name"
    field, problem = next(iter(problems.items()))
    words = problem["msg"].removeprefix("Value error, ")
    return f"worker {json.loads(text)['name']} sent an invalid {field.replace('_', ' ')}: {words}"
