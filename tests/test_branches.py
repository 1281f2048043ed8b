"""A job's kind is asked for its members, not its name: only its own room tells kinds apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench
from workbench.base import entries

PACKAGE = Path(workbench.__file__).parent
OWN_ROOMS = {
    # The form of compose/ makes a FineTune.
    "FineTune": ("finetune/", "display/compose/"),
    "Script": ("jobs/script.py",),
    "Evaluation": ("finetune/lm_eval/",),
    "Function": ("jobs/script.py",),
}
"""Classes of jobs, with the paths that may name the class in a condition."""
KIND = "the kind of a job"


def is_job(node: ast.expr) -> bool:
    """Whether an expression is called a job, as `job`, `spec.job` and `self._job`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_") == "job"
    return False


def is_kind_of_job(node: ast.expr) -> bool:
    """Whether an expression is the kind of a job, by attribute or by the key of the JSON form."""
    match node:
        case ast.Attribute(value=owner, attr="kind"):
            return is_job(owner) or class_name(owner) in OWN_ROOMS
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant("kind"), *_]):
            return is_job(owner)
        case ast.Subscript(value=owner, slice=ast.Constant("kind")):
            return is_job(owner)
    return False


def class_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def conditions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and class of every condition on the kind of a job; `KIND` where no class is named."""
    for node in ast.walk(tree):
        named: list[ast.expr] = []
        asks_kind = False
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, asked]):
                named = [each for each in ast.walk(asked) if isinstance(each, ast.expr)]
            case ast.MatchClass(cls=asked):
                named = [asked]
            case ast.Compare():
                named = [node.left, *node.comparators]
                asks_kind = any(map(is_kind_of_job, named))
            case ast.Match(subject=asked):
                asks_kind = is_kind_of_job(asked)
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[asked, *_]):
                asks_kind = is_job(asked)
            case _:
                continue
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for each in named if (name := class_name(each)) in OWN_ROOMS)
        if asks_kind:
            yield line, KIND


def branches(source: str, path: str) -> list[str]:
    """The conditions of a module on the kind of a job, but for those of the kind's own room."""
    return [
        f"{path}, line {line}: {name}"
        for line, name in conditions(ast.parse(source))
        if not path.startswith(OWN_ROOMS.get(name, OWN_ROOMS["FineTune"]))
    ]


def test_no_room_but_its_own_tells_the_kinds_of_jobs_apart() -> None:
    kinds = {*entries.JOBS, "function"}
    assert {name.lower() for name in OWN_ROOMS} == kinds, "a new kind needs a line in OWN_ROOMS"
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        found += branches(file.read_text(), file.relative_to(PACKAGE).as_posix())
    assert found == []


@pytest.mark.parametrize("page", sorted((PACKAGE / "display" / "templates").glob("*.html")))
def test_no_page_tells_the_kinds_of_jobs_apart(page: Path) -> None:
    text = page.read_text()
    assert "is_script" not in text and "job.kind" not in text


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(job, FineTune)",
        "isinstance(spec.job, (Job, Script))",
        "isinstance(job, Function | Job)",
        "issubclass(type(job), script.Script)",
        "match job:\n    case FineTune(): pass",
        "match job:\n    case Script() | None: pass",
        "job.kind == 'script'",
        "'script' != self._spec.job.kind",
        "job.kind in ('script', 'function')",
        "kind == Script.kind",
        "job.get('kind') == 'script'",
        "job['kind'] == 'script'",
        "type(job) is Script",
        "match spec.job.kind:\n    case 'script': pass",
        "getattr(job, 'stop_grace_s', None)",
        "hasattr(self._job, 'technique')",
    ],
)
def test_the_scan_sees_a_branch(source: str) -> None:
    assert branches(source, "client/run.py")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("isinstance(job, FineTune)", "finetune/advice/rules.py"),
        ("record is FineTune", "display/compose/fields.py"),
        ("isinstance(job, Job)", "client/run.py"),
        ("event.kind == 'step'", "client/run.py"),
        ("FineTune(technique='zero1')", "client/run.py"),
        ("isinstance(card, FineTuneCard)", "display/run/page.py"),
    ],
)
def test_the_scan_leaves_alone_what_is_no_branch(source: str, path: str) -> None:
    assert branches(source, path) == []
