"""`Requirements`: the packages of a job, as lines of a requirements.txt. Checks them without pip.

The lines are checked on the notebook's machine before pods start. Only pip can decide, on the pod,
whether the packages of an index go together.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import Json, as_list, as_str
from workbench.base.redact import Redactor, mask_secrets
from workbench.base.words import pluralize

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OPTIONS = (
    "--index-url",
    "-i",
    "--extra-index-url",
    "--find-links",
    "-f",
    "--no-index",
    "--pre",
    "--prefer-binary",
    "--require-hashes",
    "--only-binary",
    "--no-binary",
    "--trusted-host",
)
"""Options of a requirements.txt that pip gets unchanged."""
WITHOUT_HEADER = "; requirements=[] ignores the header and uses the pods' own packages"
"""Way out of an error of a script's header."""
_HEADER = "the header of"
_HASH = re.compile(r"\s--hash[=\s]\S+")
_HIDDEN = ("Cc", "Cf", "Zl", "Zp")
"""Unicode's categories of control characters, of invisible ones, and of ends of lines."""
_SETTINGS = "PIP_"
_SOURCES = re.compile("UV_(DEFAULT_|EXTRA_)?INDEX(_URL)?|UV_FIND_LINKS")
"""Variables by which uv chooses where packages come from."""
_OF_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """Packages of a job, and how its environment is made."""

    source: str
    """Origin of the lines for messages, such as "the header of train.py"."""
    lines: Sequence[str] = ()
    """Lines of a requirements.txt, without comments and without names of other files."""
    constraints: Sequence[str] = ()
    """Lines of constraints files."""
    requires_python: str = ""
    """Version specifier of Python. Empty: any version."""
    isolated: bool = False
    """Whether the environment sees none of the pod's packages."""
    notes: Sequence[str] = ()
    """Parts of the source that are not used."""

    @classmethod
    def read(cls, facts: Json) -> Self:
        """Read the JSON form of `facts`."""
        return cls(
            source=as_str(facts.get("source")),
            lines=[as_str(line) for line in as_list(facts.get("lines"))],
            constraints=[as_str(line) for line in as_list(facts.get("constraints"))],
            requires_python=as_str(facts.get("requires_python")),
            isolated=facts.get("isolated") is True,
            notes=[as_str(note) for note in as_list(facts.get("notes"))],
        )

    def facts(self) -> dict[str, object]:
        return asdict(self)

    @property
    def installs(self) -> bool:
        """Whether the job needs an environment of its own."""
        return bool(self.packages) or self.isolated

    @property
    def packages(self) -> Sequence[str]:
        """Lines without options."""
        return [line for line in self.lines if not line.startswith("-")]

    @property
    def way_out(self) -> str:
        """Advice for a header that cannot be fulfilled. Empty: the lines are no header's."""
        return WITHOUT_HEADER if self.source.startswith(_HEADER) else ""

    @property
    def words(self) -> str:
        """Describe the packages.

        Example:
            >>> Requirements(source="the header of train.py", lines=["trl"], isolated=True).words
            '1 requirement of the header of train.py, isolated from the packages of the pods'
        """
        many = f"{pluralize(len(self.packages), 'requirement')} of {self.source}"
        if self.isolated:
            many += ", isolated from the packages of the pods"
        return many

    def key(self, python: str, environment: Mapping[str, str]) -> str:
        """Return the name of the environment: equal for equal packages, Python and index.

        Passwords of an index do not count.
        """
        settings = [
            mask_secrets(f"{name}={value}")
            for name, value in sorted(environment.items())
            if name.startswith(_SETTINGS)
        ]
        lines = sorted(self.lines)
        whole = [python, self.isolated, lines, sorted(self.constraints), settings]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]

    def check_python(self, version: str, where: str) -> None:
        """Raise ConfigError if the packages do not accept a Python."""
        from packaging.specifiers import SpecifierSet

        if not self.requires_python or not version:
            return
        if not SpecifierSet(self.requires_python).contains(version, prereleases=True):
            raise ConfigError(
                f"{self.source} requires Python {self.requires_python}, and {where} has Python "
                f"{version}. Choose pods with that Python, or change requires-python{self.way_out}"
            )


def parsed(line: str, where: str) -> Requirement:
    """Parse a requirement. Raise ConfigError for anything else."""
    from packaging.requirements import Requirement

    hidden = [letter for letter in line if unicodedata.category(letter) in _HIDDEN]
    if any(letter != "\t" for letter in hidden):
        raise ConfigError(
            f"{where}: {line[:200]!r} has a control character, which begins a new line or hides "
            "letters. Write a requirement on a line of its own"
        )
    try:
        return Requirement(_HASH.sub("", line))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        hint = "such as 'trl==1.16.0'"
        if line.startswith("-"):
            hint = "pip's options are variables PIP_… in env, or lines of a requirements.txt"
        elif "/" in line or line.endswith(".whl"):
            hint = "a file on the pods is 'NAME @ file:///FOLDER/NAME-1.0-py3-none-any.whl'"
        raise ConfigError(
            f"{where}: {line[:200]!r} is not a requirement ({reason}). "
            f"Write a name with versions; {hint}"
        ) from error


def check_specifier(requires_python: object, where: str) -> str:
    """Return a version specifier of Python as text. Raise ConfigError for anything else."""
    from packaging.specifiers import SpecifierSet

    if requires_python is None:
        return ""
    try:
        versions = SpecifierSet(str(requires_python))
        versions.contains("3.11")  # a number of thousands of digits fails here
        return str(versions)
    except ValueError as error:
        raise ConfigError(
            f"{where}: requires-python is {shortened(requires_python)}, not a version "
            "specifier. Write the versions as in '>=3.11'"
        ) from error


def check_secrets(lines: Iterable[str], where: str, environment: Mapping[str, str]) -> None:
    """Refuse a line with a secret: the run directory keeps the lines."""
    redact = Redactor(environment)
    for number, line in enumerate(lines):
        if redact(line) != line:
            raise ConfigError(
                f"line {number + 1} of {where} looks as if it has a secret, and the run directory "
                "keeps the lines. Give the value as env={'NAME': …} and write ${NAME} into the "
                "line: pip fills in the value on the pod. An index is PIP_INDEX_URL in env"
            )


def settings_of_uv(environment: Mapping[str, str]) -> list[str]:
    """Return a note on variables that pip does not read.

    Raises:
        ConfigError: An index is given for uv alone. pip would ask PyPI for the same names.
    """
    names = sorted(name for name in environment if name.startswith("UV_"))
    sources = [name for name in names if _SOURCES.fullmatch(name)]
    if sources and not any(environment.get(name) for name in _OF_PIP):
        raise ConfigError(
            f"env has {', '.join(sources)}, and the packages are installed by pip, which reads no "
            f"variable of uv. Give the source as {_OF_PIP[0]}, {_OF_PIP[1]} or {_OF_PIP[2]}"
        )
    return [f"{', '.join(names)} in env: not used, as pip installs the packages"] if names else []
