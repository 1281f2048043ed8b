"""Write the tables of options, of result fields and of public names into the pages of docs/.

`make options` renews the tables, so a code host shows them without a build. A table stands between
`<!-- options: FineTune -->` and `<!-- end -->`. Words after the name change the table: `own` leaves
out inherited options, and `fields` leaves out the defaults. `<!-- names -->` is the table of all
public names, and `<!-- refusals -->` says why a fine-tuning job is refused.

Pydantic fields bring their description. Other records have a string literal below each field, which
only the source has. A class without fields, or a function, describes its parameters in the Args
section of its docstring. An option without a description is an error.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import workbench
from workbench.finetune.job.refusals import REFUSALS

__all__ = [
    "MODULES",
    "PAGES",
    "PUBLIC",
    "Option",
    "anchors_of",
    "find",
    "options_of",
    "renewed",
    "table_of",
]

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "workbench"
MODULES = ("data", "deepspeed", "errors", "forms", "places", "results", "wikisql")
"""Public modules below `workbench`."""
PUBLIC: Mapping[str, object] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (workbench, *(importlib.import_module(f"workbench.{each}") for each in MODULES))
    for name in module.__all__
}
"""Every public name of the package by its import path."""
PAGES = sorted(path for path in (_ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
"""Every page of docs/."""
_TABLE = re.compile(
    r"(?P<begin><!-- (?P<kind>options|names|refusals):?(?P<words>[\w ]*) -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
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
    """Return the object of a name: a public one, or the only one below `workbench`.

    Raises:
        LookupError: There is none, or more than one.
    """
    for path, value in PUBLIC.items():
        if path.rpartition(".")[2] == name:
            return value
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


def table_of(options: Sequence[Option], anchors: Sequence[str] = ()) -> list[str]:
    """Return the lines of a Markdown table. With anchors, each name links to its own row."""
    places = anchors or [""] * len(options)
    named = [_named(o.name, anchor) for o, anchor in zip(options, places, strict=True)]
    rows = [
        f"| {name} | {_default_text(o.default)} | {_cell(o.meaning)} |"
        for name, o in zip(named, options, strict=True)
    ]
    return ["| option | default | meaning |", "|---|---|---|", *rows]


def fields_of(options: Sequence[Option]) -> list[str]:
    """Return the lines of a Markdown table without a column of defaults."""
    rows = [f"| `{o.name}` | {_cell(o.meaning)} |" for o in options]
    return ["| field | meaning |", "|---|---|", *rows]


def names_table(page: str) -> list[str]:
    """Return the lines of a table of public names, in the order of the page's headings."""
    headings = _HEADING.findall(page)
    rows = []
    for path in sorted(PUBLIC, key=lambda each: headings.index(each.rpartition(".")[2])):
        module, _, name = path.rpartition(".")
        first = (inspect.getdoc(PUBLIC[path]) or "").partition("\n")[0]
        rows.append(f"| [`{name}`](#{_slug(name)}) | `{module}` | {_cell(first)} |")
    return ["| name | module | is |", "|---|---|---|", *rows]


def refusals_table() -> list[str]:
    """Return the lines of a table of the refusals of a fine-tuning job, by option."""
    rows = []
    for option in options_of(workbench.FineTune):
        for refusal in REFUSALS:
            if refusal.option == option.name:
                # A function of a technique or a method has no name of its own in the list.
                first = (refusal.check.__doc__ or "").partition("\n")[0]
                why = (
                    first.removeprefix("Raise ConfigError ")
                    or f"by the class of the {option.name}."
                )
                facts = ", ".join(f"`{need}`" for need in refusal.needs) or "options"
                rows.append(f"| `{option.name}` | {_cell(why)} | {facts} |")
    return ["| option | refused | known from |", "|---|---|---|", *rows]


def anchors_of(owner: str, options: Sequence[Option], taken: set[str]) -> list[str]:
    """Return an anchor for each option, and add the anchors to those that are taken.

    The first option of a name has the name itself: `learning-rate`. Others begin with the owner.
    """
    anchors = []
    for option in options:
        short = option.name.replace("_", "-").lower()
        anchor = short if short not in taken else f"{owner.lower()}-{short}"
        taken.add(anchor)
        anchors.append(anchor)
    return anchors


def renewed(page: str) -> str:
    """Return a page with every table as the code is now.

    Raises:
        LookupError: An option has no description.
    """
    taken = {_slug(heading) for heading in _HEADING.findall(page)}

    def table(match: re.Match[str]) -> str:
        if match["kind"] == "names":
            lines = names_table(page)
        elif match["kind"] == "refusals":
            lines = refusals_table()
        else:
            owner, *words = match["words"].split()
            lines = _table(owner, words, taken)
        return match["begin"] + "\n" + "\n".join(lines) + "\n\n" + match["end"]

    return _TABLE.sub(table, page)


def main() -> None:
    """Renew all pages, and name the changed ones."""
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        new = renewed(page)
        if new != page:
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"renewed {path.relative_to(_ROOT)}\n")


def _table(owner: str, words: Sequence[str], taken: set[str]) -> list[str]:
    thing = find(owner)
    options = options_of(thing)
    if "own" in words:
        options = [o for o in options if o.name in thing.__annotations__]
    if silent := [o.name for o in options if not o.meaning]:
        raise LookupError(f"options of {owner} without a description: {', '.join(silent)}")
    if "fields" in words:
        return fields_of(options)
    first = getattr(thing, "first", ())
    if not first:
        return table_of(options, anchors_of(owner, options, taken))
    # The options that most people set come first, and all others by group.
    groups: dict[str, list[Option]] = {"Most used": [o for o in options if o.name in first]}
    sections = {option.name: option.section for option in thing.options()}
    for option in options:
        if option.name not in first:
            groups.setdefault(sections[option.name], []).append(option)
    lines = []
    for title, group in groups.items():
        lines += [f"**{title}**", "", *table_of(group, anchors_of(owner, group, taken)), ""]
    return lines[:-1]


def _named(name: str, anchor: str) -> str:
    return f'<a id="{anchor}"></a>[`{name}`](#{anchor})' if anchor else f"`{name}`"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


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


if __name__ == "__main__":
    main()
