"""The name and the note that people give a run: a small file of its own, which may change after the run has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from workbench.base.errors import ConfigError, RunError, shortened
from workbench.base.files import read_json, write_json
from workbench.base.json_values import part, problem_in, text
from workbench.base.redact import Redactor, mask_secrets
from workbench.rundir.paths import RunPaths

_LONGEST = {"name": 80, "note": 2000}  # letters


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What people call a run, and what they remark on it; empty where nobody did."""

    name: str = ""
    note: str = ""


def read_label(paths: RunPaths) -> Label:
    """Read the label of a run, whatever its file holds."""
    raw = read_json(paths.label)
    return Label(**{name: mask_secrets(text(raw.get(name)))[:most] for name, most in _LONGEST.items()})


def write_label(paths: RunPaths, **changes: object) -> None:
    """Change a run's name or note; what looks like a secret, or is one of the job's, is masked."""
    spec = read_json(paths.spec)
    env = {**part(part(part(spec, "cluster"), "pods"), "env"), **part(part(spec, "job"), "env")}
    redact = Redactor({name: os.environ.get(name, "") for name in env})
    for name, value in changes.items():
        match value:
            case str() if len(value) <= _LONGEST[name] and not problem_in(value):
                changes[name] = redact(value.strip())
            case _:
                raise ConfigError(
                    f"the {name} of a run is {shortened(value)}; it must be text of at most {_LONGEST[name]} letters"
                )
    label = replace(read_label(paths), **changes)  # type: ignore[arg-type]
    try:
        write_json(paths.label, {"name": label.name, "note": label.note}, mode=0o644)
    except OSError as error:
        raise RunError(f"{paths.label} cannot be written: {error.strerror or error}") from error
