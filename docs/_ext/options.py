"""The directive `options`: a table of every option of a record, a class or a function.

Pydantic fields bring their description. Other records have a string literal below each field, which
only the source has. A class without fields, or a function, describes its parameters in the Args
section of its docstring. An option that nobody describes is a warning, and warnings fail the build.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import workbench

__all__ = ["Option", "find", "options_of", "setup", "table_of"]

_PACKAGE = Path(workbench.__file__).parent
_LOG = logging.getLogger(__name__)
_REQUIRED = inspect.Parameter.empty
_CHOICES = re.compile(r"One of `(\w+)`")
_ENTRY = re.compile(r"(?P<name>\w+): (?P<text>.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of an object."""

    name: str
    """Name of the field or the parameter."""
    default: object
    """Its default; `_REQUIRED` where it must be given."""
    meaning: str
    """What it means, in Markdown; empty where nobody says."""


def find(name: str) -> Any:
    """Return the object of a name: a public one of `workbench`, or the only one below it.

    Raises:
        LookupError: There is none, or more than one.
    """
    if name in workbench.__all__:
        return getattr(workbench, name)
    defines = re.compile(rf"^(?:class|def) {re.escape(name)}\b", re.MULTILINE)
    homes = [
        path
        for path in sorted(_PACKAGE.rglob("*.py"))
        if defines.search(path.read_text(encoding="utf-8"))
    ]
    if len(homes) != 1:
        raise LookupError(
            f"{name} is defined in {len(homes)} modules of workbench; exactly one is needed"
        )
    parts = homes[0].relative_to(_PACKAGE.parent).with_suffix("").parts
    return getattr(importlib.import_module(".".join(parts).removesuffix(".__init__")), name)


def options_of(thing: Any) -> list[Option]:
    """Return the options of a pydantic model, a dataclass, a documented class, or a function."""
    if (model := getattr(thing, "__pydantic_fields__", None)) is not None:
        return [_of_pydantic(thing, name, info) for name, info in model.items()]
    if is_dataclass(thing) and isinstance(thing, type):
        texts = _literals(thing)
        return [
            Option(
                name=f.name,
                default=_default_of(f),
                meaning=_with_choices(thing, f.name, texts.get(f.name, "")),
            )
            for f in dataclass_fields(thing)
            if f.init
        ]
    function = thing.__init__ if isinstance(thing, type) else thing
    texts = _arguments(inspect.getdoc(function) or "")
    parameters = list(inspect.signature(thing).parameters.values())
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        Option(name=p.name, default=p.default, meaning=texts.get(p.name, ""))
        for p in parameters
        if p.kind not in kinds and p.name != "self"
    ]


def table_of(options: Sequence[Option], *, defaults: bool = True) -> list[str]:
    """Return the lines of a Markdown table, with or without a column of defaults."""
    if not defaults:
        return [
            "| field | meaning |",
            "|---|---|",
            *(f"| `{o.name}` | {_cell(o.meaning)} |" for o in options),
        ]
    rows = [f"| `{o.name}` | {_default_text(o.default)} | {_cell(o.meaning)} |" for o in options]
    return ["| option | default | meaning |", "|---|---|---|", *rows]


class OptionsDirective(SphinxDirective):
    """Insert the table of one object's options."""

    required_arguments = 1
    option_spec = {"own": directives.flag, "fields": directives.flag}  # noqa: RUF012 - the form that docutils asks for

    def run(self) -> list[nodes.Node]:
        """Read the options, warn of those without a meaning, and parse the table as Markdown."""
        name = self.arguments[0]
        thing = find(name)
        for path in _sources(thing):
            self.env.note_dependency(path)
        options = options_of(thing)
        if "own" in self.options:
            options = [o for o in options if o.name in thing.__annotations__]
        for option in options:
            if not option.meaning:
                _LOG.warning(
                    "%s.%s has no description", name, option.name, location=self.get_location()
                )
        return _parsed(self, table_of(options, defaults="fields" not in self.options))


class NamesDirective(SphinxDirective):
    """Insert the table of all public names, each with the first line of its docstring."""

    def run(self) -> list[nodes.Node]:
        """Read the names and parse the table as Markdown."""
        self.env.note_dependency(str(_PACKAGE / "__init__.py"))
        first = {
            name: (inspect.getdoc(find(name)) or "").partition("\n")[0]
            for name in sorted(workbench.__all__)
        }
        lines = [
            "| name | is |",
            "|---|---|",
            *(f"| `{name}` | {_cell(text)} |" for name, text in first.items()),
        ]
        return _parsed(self, lines)


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directives."""
    app.add_directive("options", OptionsDirective)
    app.add_directive("names", NamesDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _parsed(directive: SphinxDirective, lines: Sequence[str]) -> list[nodes.Node]:
    container = nodes.container()
    directive.state.nested_parse(
        StringList(list(lines), source="options"), directive.content_offset, container
    )
    return list(container.children)


def _of_pydantic(model: type, name: str, info: Any) -> Option:
    """Read one field of a pydantic model; its description may stand below it, as elsewhere."""
    default = _REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
    text = info.description or _literals(model).get(name, "")
    return Option(
        name=info.alias or name, default=default, meaning=_with_choices(model, name, text)
    )


def _default_of(field: Any) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return _REQUIRED if field.default is MISSING else field.default


def _literals(record: type) -> dict[str, str]:
    """Return the string literal below each field of the class and of its bases."""
    texts: dict[str, str] = {}
    for cls in reversed(record.__mro__):
        if not cls.__module__.startswith("workbench"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = ast.get_docstring(ast.Module(body=[below], type_ignores=[]))
                if text:
                    texts[statement.target.id] = " ".join(text.split())
    return texts


def _arguments(docstring: str) -> dict[str, str]:
    """Return the entries of the Args section of a Google docstring."""
    section = re.search(
        r"^Args:\n(?P<body>(?:[ ]+.*\n?|\n(?=[ ]))*)", docstring, flags=re.MULTILINE
    )
    texts: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section["body"]).splitlines() if section else ():
        if entry := _ENTRY.fullmatch(line):
            name = entry["name"]
            texts[name] = entry["text"]
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts


def _with_choices(record: type, name: str, text: str) -> str:
    """Name the allowed values: in place of their enum's name, or after the text.

    They stand after the text where only the type has them.
    """
    # A field may be declared in a class above: its type is named in that class's module.
    modules = [importlib.import_module(owner.__module__) for owner in reversed(record.__mro__)]
    namespace = {name: value for module in modules for name, value in vars(module).items()}
    if (match := _CHOICES.search(text)) and (values := _values(namespace.get(match[1]))):
        return text.replace(match[0], f"One of {values}")
    try:
        values = _values(get_type_hints(record).get(name))
    except (NameError, TypeError):  # a type that is imported for the checker alone
        values = ""
    unnamed = [value for value in values.split(", ") if value not in text]
    return f"{text} One of {values}." if text and values and unnamed else text


def _values(kind: object) -> str:
    """Return the values of an enum, a Literal or a tuple of names as Markdown; empty for others."""
    if isinstance(kind, tuple):
        return ", ".join(f"`{value}`" for value in kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{value}`" for value in kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    return ""


def _default_text(default: object) -> str:
    if default is _REQUIRED:
        return "required"
    if isinstance(default, StrEnum):
        default = str(default)
    if isinstance(default, str | list | tuple | dict) and not default:
        return "none"
    return f"`{_cell(repr(default))}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _sources(thing: Any) -> Iterator[str]:
    classes = thing.__mro__ if isinstance(thing, type) else (thing,)
    for each in classes:
        if each.__module__.startswith("workbench") and (path := inspect.getsourcefile(each)):
            yield path
