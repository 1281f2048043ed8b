"""Read the pinned packages of a `uv.lock`, without uv.

Read are the packages of the locked project, without groups and without extras beyond its own
dependencies. Versions are pinned. Hashes are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, items, part, text

_PYPI = "https://pypi.org/simple"
_OWN = ("virtual", "editable", "directory")
_KNOWN_VERSIONS = (1,)
_EXTRA = re.compile(r"\bextra\b")

_Name = tuple[str, str]
"""Name and version of a package."""
_Markers = set[frozenset[str]]
"""Ways to a package, as sets of markers. All markers of a set must hold. An empty set: always."""


def locked_lines(lock: Json, path: Path) -> list[str]:
    """Return the packages of a lock as lines of a requirements.txt."""
    if lock.get("version") not in _KNOWN_VERSIONS:
        raise ConfigError(
            f"{path} is of version {lock.get('version')!r}, and version 1 is known here. Export "
            "the packages: uv export --no-hashes > requirements.txt"
        )
    packages: dict[_Name, Json] = {}
    for package in _tables(lock, "package"):
        packages[text(package.get("name")), text(package.get("version"))] = package
    roots = [name for name, package in packages.items() if _is_root(package, path)]
    if not roots:
        raise ConfigError(
            f"{path} locks no project. Export the packages: uv export --no-hashes > "
            "requirements.txt"
        )
    found: dict[tuple[_Name, str], _Markers] = {}
    waiting = [(name, "", frozenset[str]()) for name in roots]
    while waiting:
        name, extra, way = waiting.pop()
        for needed, marker, extras in _edges(packages, name, extra, path):
            onward = way | {marker} if marker else way
            for each in ("", *extras):
                ways = found.setdefault((needed, each), set())
                # A known way with fewer markers includes this one.
                if not any(known <= onward for known in ways):
                    ways.add(onward)
                    waiting.append((needed, each, onward))
    lines = []
    indexes: dict[str, None] = {}
    for name in sorted({name for name, _ in found} - set(roots)):
        lines.append(_line(packages[name], found[name, ""], path))
        registry = text(part(packages[name], "source").get("registry"))
        if registry and registry.rstrip("/") != _PYPI:
            indexes[registry] = None
    return [*(f"--extra-index-url {index}" for index in indexes), *lines]


def _edges(
    packages: Mapping[_Name, Json], name: _Name, extra: str, path: Path
) -> Iterator[tuple[_Name, str, list[str]]]:
    """Yield the needed packages of a package, or of an extra, with markers and extras."""
    package = packages[name]
    needs = _tables(package, "dependencies")
    if extra:
        needs = _tables(part(package, "optional-dependencies"), extra)
    for need in needs:
        wanted = text(need.get("name"))
        version = text(need.get("version"))
        fits = [
            each for each in packages if each[0] == wanted and (not version or each[1] == version)
        ]
        if len(fits) != 1:
            raise ConfigError(
                f"{path}: {name[0]} needs {wanted}, which the lock names {len(fits)} times. "
                "Lock again: uv lock"
            )
        marker = text(need.get("marker"))
        if _EXTRA.search(marker):
            raise ConfigError(
                f"{path} has conflicting extras. Export the packages: uv export --no-hashes > "
                "requirements.txt"
            )
        yield fits[0], marker, [text(each) for each in items(need.get("extra"))]


def _line(package: Json, ways: _Markers, path: Path) -> str:
    name = text(package.get("name"))
    source = part(package, "source")
    line = f"{name}=={text(package.get('version'))}"
    if "git" in source:
        address, _, commit = text(source.get("git")).partition("#")
        line = f"{name} @ git+{address.partition('?')[0]}@{commit}"
    elif "url" in source:
        line = f"{name} @ {text(source.get('url'))}"
    elif "registry" not in source or "://" not in text(source.get("registry")):
        raise ConfigError(
            f"{path}: {name} is a file or folder of this machine, which is not on the pods. "
            "Put the package into the script's folder, or lock a published version"
        )
    if frozenset() in ways:
        return line
    shortest = [way for way in ways if not any(other < way for other in ways)]
    each = sorted(" and ".join(f"({marker})" for marker in sorted(way)) for way in shortest)
    return f"{line} ; {' or '.join(each)}"


def _is_root(package: Json, path: Path) -> bool:
    source = part(package, "source")
    places = [text(source.get(kind)) for kind in _OWN if kind in source]
    return bool(places) and (path.parent / places[0]).resolve() == path.parent.resolve()


def _tables(table: Json, key: str) -> list[Json]:
    return [each for each in items(table.get(key)) if isinstance(each, dict)]
