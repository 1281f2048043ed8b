"""Read and write the label of a run: name, note and tags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from workbench.base.errors import ConfigError, RunError, shortened
from workbench.base.files import read_json, write_json
from workbench.base.json_values import as_list, as_str, get_object, problem_in
from workbench.base.redact import Redactor, mask_secrets
from workbench.rundir.paths import RunPaths

_LONGEST = {"name": 80, "note": 2000}  # letters
_LONGEST_TAG = 40  # letters
_MOST_TAGS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name, note and tags of a run. Empty: not set."""

    name: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()


def read_label(paths: RunPaths) -> Label:
    """Read the label of a run; ignore invalid entries of the file."""
    raw = read_json(paths.label)
    texts = {}
    for name, most in _LONGEST.items():
        masked = mask_secrets(as_str(raw.get(name)))
        texts[name] = masked[:most]
    tags = [
        mask_secrets(as_str(tag))[:_LONGEST_TAG] for tag in as_list(raw.get("tags"))[:_MOST_TAGS]
    ]
    return Label(**texts, tags=_distinct(tags))


def write_label(paths: RunPaths, **changes: object) -> None:
    """Change name, note or tags of a run; mask secrets of the job and text that looks like one."""
    spec = read_json(paths.spec)
    pods = get_object(get_object(spec, "cluster"), "pods")
    job = get_object(spec, "job")
    env = {**get_object(pods, "env"), **get_object(job, "env")}
    values = {name: os.environ.get(name, "") for name in env}
    redact = Redactor(values)
    # A secret that a user pastes into a note must not be stored.
    for name, value in changes.items():
        match value:
            case [*tags] if name == "tags":
                changes[name] = _distinct([redact(_checked_tag(tag)) for tag in tags])
            case str() if len(value) <= _LONGEST.get(name, 0) and not problem_in(value):
                changes[name] = redact(value.strip())
            case _ if name == "tags":
                raise ConfigError(f"the tags of a run are {shortened(value)}; give a list of texts")
            case _:
                raise ConfigError(
                    f"the {name} of a run is {shortened(value)}; "
                    f"give text of at most {_LONGEST[name]} letters"
                )
    # Fields without a change keep their values.
    try:
        label = asdict(read_label(paths))
        label.update(changes)
        if len(label["tags"]) > _MOST_TAGS:
            raise ConfigError(
                f"the run has {len(label['tags'])} tags; give at most {_MOST_TAGS} tags"
            )
        write_json(paths.label, label, mode=0o644)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{paths.label} cannot be written: {reason}") from error


def _checked_tag(tag: object) -> str:
    """Return a tag without blanks around; ConfigError for an invalid tag."""
    match tag:
        case str() if len(tag) <= _LONGEST_TAG and "," not in tag and not problem_in(tag):
            return tag.strip()
    raise ConfigError(
        f"a tag of a run is {shortened(tag)}; "
        f"give text of at most {_LONGEST_TAG} letters without a comma"
    )


def _distinct(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the tags once each, without empty tags."""
    return tuple(dict.fromkeys(tag for tag in tags if tag))
