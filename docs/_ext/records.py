"""How autodoc shows records: the options of a record stand on the options page, not twice."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

from sphinx.application import Sphinx

__all__ = ["setup"]


def shorten_signature(
    _app: Sphinx, what: str, _name: str, thing: object, *_: object
) -> tuple[str, None] | None:
    """Return a short signature for a record; a job has more than 60 options."""
    if what != "class":
        return None
    if _is_record(thing):
        return "(**options)", None
    return (f"({fields(thing)[0].name}, **options)", None) if is_dataclass(thing) else None


def leave_out_options(
    _app: Sphinx, what: str, _name: str, thing: object, _options: object, lines: list[str]
) -> None:
    """Remove the Args section of a record, and mend what napoleon would misread."""
    text = "\n".join(lines)
    if what == "class" and _is_record(thing):
        text = re.sub(r"^Args:\n(?:[ ]+.*\n?|\n(?=[ ]))*", "", text, flags=re.MULTILINE)
    # Docstrings write examples as an indented block below `Example:`.
    text = re.sub(r"^(\s*)Example:\n(?!\s*>>>)", r"\1Example::\n\n", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")
    # Napoleon takes the words before a colon in the first line for the type of a property, so the
    # first line is an empty comment.
    if what in ("property", "attribute"):
        lines[0:0] = ["..", ""]


def _is_record(thing: object) -> bool:
    return bool(getattr(thing, "__pydantic_fields__", None))


def setup(app: Sphinx) -> dict[str, object]:
    """Connect both to autodoc, before napoleon reads the docstrings."""
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", leave_out_options, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
