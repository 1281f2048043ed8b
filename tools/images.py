"""Write the packages of the images, with the hashes of `requirements.lock`: `make requirements`.

`docker/pods.lock` has the packages of a pod with all that they need, except torch and the CUDA
packages that torch pins. `docker/notebook.lock` has what the notebook needs beside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["locks"]

REPOSITORY = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^([a-z0-9-]+)==(?:.*\\\n)*.*\n", re.MULTILINE)
_PYTHONS = ("3.11", "3.12", "3.13")
_BUILD = ("setuptools", "ninja")  # for the kernels of DeepSpeed
_HEADER = "# Written by `make requirements`: the lines of requirements.lock for {}.\n"


def locks() -> dict[Path, str]:
    """Return the text of each file."""
    text = (REPOSITORY / "requirements.txt").read_text()
    pods = _with_needs([*_paragraph(text, "# What runs on"), *_BUILD])
    notebook = _with_needs(_paragraph(text, "# The notebook"))
    of_docker = REPOSITORY / "docker"
    return {
        of_docker / "pods.lock": _locked(pods, "pods"),
        of_docker / "notebook.lock": _locked(notebook - pods, "the notebook, beside pods.lock"),
    }


def _paragraph(text: str, heading: str) -> list[str]:
    lines = text[text.index(f"\n{heading}") + 1 :].split("\n\n")[0].splitlines()[1:]
    return [line.partition("==")[0] for line in lines]


def _with_needs(names: Sequence[str]) -> set[str]:
    """Return these packages and all that they need, as the installed packages say."""
    found: set[tuple[str, str]] = set()
    left = [(canonicalize_name(name), "") for name in names]
    while left:
        name, extra = left.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # of another platform or Python
            continue
        for need in map(Requirement, needs):
            if need.marker is None or _is_needed(need, extra):
                of = canonicalize_name(need.name)
                left += [(of, more) for more in ("", *need.extras)]
    return {name for name, _ in found}


def _is_needed(need: Requirement, extra: str) -> bool:
    environment = {**default_environment(), "extra": extra}
    assert need.marker is not None
    return any(
        need.marker.evaluate(
            {**environment, "python_version": version, "python_full_version": f"{version}.0"}
        )  # type: ignore[arg-type]
        for version in _PYTHONS
    )


def _locked(names: set[str], whose: str) -> str:
    text = (REPOSITORY / "requirements.lock").read_text()
    blocks = [found[0] for found in _BLOCK.finditer(text) if found[1] in names]
    return _HEADER.format(whose) + "".join(blocks)


if __name__ == "__main__":
    for path, text in locks().items():
        path.write_text(text)
