"""Read requirements: a list, a requirements.txt, a pyproject.toml, a uv.lock, a script's header."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import decode_source
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, read_bytes, read_given, user_path
from workbench.base.json_values import get_object
from workbench.jobs.requirements.lock import export_lock, read_toml
from workbench.jobs.requirements.requirements import (
    OPTIONS,
    WITHOUT_HEADER,
    Requirements,
    check_secrets,
    check_specifier,
    parsed,
    settings_of_uv,
)

_OPENING = "# /// script"
_CLOSING = "# ///"
_LIKE_OPENING = re.compile(r"^#[ \t]*///[ \t]*script[ \t]*$", re.IGNORECASE | re.MULTILINE)
_COMMENT = re.compile(r"(?<!\S)#.*$")
_JOINED = re.compile(r"\\\r?\n")
_OTHER_FILE = re.compile(
    r"(?P<option>-r|--requirement|-c|--constraint)(\s+|\s*=\s*|(?<=-[rc]))(?P<path>\S.*)"
)
_HEADER_KEYS = {"dependencies", "requires-python"}
_LOCK = "uv.lock"
_PROJECT = "pyproject.toml"


def read_requirements(
    given: str | Sequence[str] | None,
    script: Path,
    environment: Mapping[str, str],
    *,
    isolated: bool,
) -> Requirements | None:
    """Read the requirements of a script. None: the script starts with the pod's own Python.

    Raise ConfigError for requirements that cannot be read or fulfilled.
    """
    content = _content_of(script)
    has_header = _LIKE_OPENING.search(content) is not None
    if given is None:
        try:
            header = header_in(content, script.name)
            return _checked(header, script, environment, isolated=isolated)
        except ConfigError as error:
            if not has_header:
                raise
            raise ConfigError(f"{error}{WITHOUT_HEADER}") from error
    found: Requirements
    if isinstance(given, str):
        found = _of_file(user_path(given).absolute())
    else:
        for number, line in enumerate(given):
            parsed(line, f"requirements[{number}]")
        found = Requirements(source="requirements", lines=[*given])
    if has_header:
        note = f"the header of {script.name} is not used, as requirements are given"
        found = replace(found, notes=[*found.notes, note])
    return _checked(found, script, environment, isolated=isolated)


def _checked(
    found: Requirements | None, script: Path, environment: Mapping[str, str], *, isolated: bool
) -> Requirements | None:
    """Check the lines before the start of pods. None: there are no requirements."""
    if found is None:
        if isolated:
            raise ConfigError(
                "isolated=True makes an environment without the pod's packages, and the script has "
                "no requirements. Give requirements=[…], or a header '# /// script' in "
                f"{script.name}"
            )
        return None
    check_secrets([*found.lines, *found.constraints], found.source, environment)
    notes = settings_of_uv(environment) if found.packages else []
    return replace(found, isolated=isolated, notes=[*found.notes, *notes])


def _content_of(script: Path) -> str:
    """Return the text of a script as Python reads it. Empty: no readable script."""
    try:
        return decode_source(read_bytes(Path(os.path.realpath(script))))
    except (OSError, SyntaxError, ValueError):  # the check of the script's folder names the error
        return ""


def _blocks(content: str) -> list[list[str]]:
    """Return the lines of the headers in the text of a script (PEP 723), with comment signs.

    The regular expression of PEP 723 needs four times as long for a text twice as long.
    """
    blocks = []
    lines = content.split("\n")
    at = 0
    while at < len(lines):
        if lines[at] != _OPENING:
            at += 1
            continue
        end = at + 1
        closing = at
        while end < len(lines) and (lines[end] == "#" or lines[end].startswith("# ")):
            if lines[end] == _CLOSING:
                closing = end
            end += 1
        if closing > at:
            blocks.append(lines[at + 1 : closing])
        at = end
    return blocks


def header_in(content: str, name: str) -> Requirements | None:
    r"""Read the header in the text of a script.

    Example:
        >>> text = '# /// script\n# dependencies = ["trl>=1"]\n# ///\nimport trl\n'
        >>> header_in(text, "train.py").lines
        ['trl>=1']
    """
    where = f"the header of {name}"
    blocks = _blocks(content)
    if not blocks:
        like = _LIKE_OPENING.search(content)
        if like is None:
            return None
        number = content.count("\n", 0, like.start()) + 1
        raise ConfigError(
            f"line {number} of {name} is {like[0]!r}, and no header follows. Write the lines"
            f" {_OPENING!r} and {_CLOSING!r} with the same blanks, and '# ' at the start of"
            " every line between"
        )
    if len(blocks) > 1:
        raise ConfigError(f"{name} has {len(blocks)} blocks '# /// script'. Keep a single block")
    table = read_toml("\n".join(line[2:] for line in blocks[0]), where)
    dependencies = _texts(table.get("dependencies", []), f"dependencies of {where}")
    for line in dependencies:
        parsed(line, where)
    unused = sorted(set(table) - _HEADER_KEYS)
    notes = [f"{where}: [{key}] is not used" for key in unused]
    return Requirements(
        source=where,
        lines=dependencies,
        requires_python=check_specifier(table.get("requires-python"), where),
        notes=notes,
    )


def _of_file(path: Path) -> Requirements:
    if path.name == _PROJECT:
        locked = path.with_name(_LOCK)
        return _of_lock(locked) if is_there(locked) else _of_project(path)
    if path.name == _LOCK:
        return _of_lock(path)
    if path.suffix in (".lock", ".toml"):
        raise ConfigError(
            f"requirements is {path}: of TOML files and locks, {_PROJECT} and {_LOCK} are known. "
            "Export the packages to a requirements.txt"
        )
    lines: list[str] = []
    constraints: list[str] = []
    _add_file(path, lines, constraints, seen=[])
    return Requirements(source=path.name, lines=lines, constraints=constraints)


def _add_file(path: Path, lines: list[str], constraints: list[str], seen: Sequence[Path]) -> None:
    """Add the lines of a requirements.txt, and of the files named in the file."""
    if path in seen:
        raise ConfigError(f"{path} names itself, through {seen[-1]}. Remove a line")
    _add_lines(_read(path), path, lines, constraints, seen=seen)


def _add_lines(
    content: str, path: Path, lines: list[str], constraints: list[str], seen: Sequence[Path]
) -> None:
    """Add the lines of the text of a requirements.txt at `path`."""
    joined = _JOINED.sub(" ", content)
    for number, raw in enumerate(joined.splitlines(), 1):
        line = _COMMENT.sub("", raw).strip()
        if not line:
            continue
        where = f"{path.name}, line {number}"
        other = _OTHER_FILE.fullmatch(line)
        if other is not None:
            named = path.parent / user_path(other["path"].strip())
            here = constraints if "c" in other["option"].lstrip("-")[:1] else lines
            _add_file(named, here, constraints, [*seen, path])
            continue
        if line.startswith("-"):
            _check_option(line, where)
        else:
            parsed(line, where)
        lines.append(line)


def _check_option(line: str, where: str) -> None:
    option = re.split(r"[\s=]", line, maxsplit=1)[0]
    if option in OPTIONS:
        return
    if option in ("-e", "--editable"):
        raise ConfigError(
            f"{where}: {line!r} names a folder of this machine, which is not on the pods. Put the "
            "package into the script's folder, or install from a wheel or a repository"
        )
    raise ConfigError(
        f"{where}: the option {option} is not known here. Allowed: {', '.join(OPTIONS)}"
    )


def _of_project(path: Path) -> Requirements:
    table = read_toml(_read(path), str(path))
    project = get_object(table, "project")
    if not project:
        raise ConfigError(f"{path} has no [project] with dependencies. Give a list of requirements")
    notes = []
    if "dependencies" in _texts(project.get("dynamic", []), f"dynamic of {path}"):
        raise ConfigError(
            f"{path} computes its dependencies (dynamic). Give a list, or a requirements.txt"
        )
    dependencies = _texts(project.get("dependencies", []), f"dependencies of {path}")
    for line in dependencies:
        parsed(line, path.name)
    if project.get("optional-dependencies") or table.get("dependency-groups"):
        notes.append(f"{path.name}: optional dependencies and groups are not installed")
    return Requirements(
        source=path.name,
        lines=dependencies,
        requires_python=check_specifier(project.get("requires-python"), path.name),
        notes=notes,
    )


def _of_lock(path: Path) -> Requirements:
    table = read_toml(_read(path), str(path))
    lines: list[str] = []
    _add_lines(export_lock(path), path, lines, [], seen=())
    return Requirements(
        source=path.name,
        lines=lines,
        requires_python=check_specifier(table.get("requires-python"), path.name),
    )


def _read(path: Path) -> str:
    if not is_there(path):
        raise ConfigError(f"the file of requirements {str(path)[:300]} does not exist")
    try:
        return read_given(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of requirements {path} cannot be read: {error}") from error


def _texts(value: object, where: str) -> list[str]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [str(each) for each in value]
    raise ConfigError(f"{where} must be a list of strings, such as ['trl==1.16.0']")
