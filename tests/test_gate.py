"""Files below a run or cluster directory are opened in `workbench/base/files/gate.py` alone.

A call that opens, lists, writes, moves or removes a file, or has a library load one, is refused
outside that module. `gate_allowed.toml` names the functions that never touch such a directory, or
touch one that belongs to their own user, with the reason.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
ALLOWED = Path(__file__).with_name("gate_allowed.toml")
GATE = "base/files/gate.py"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


METHODS = words(
    "open read_text read_bytes write_text write_bytes iterdir glob rglob walk unlink rename mkdir"
    " rmdir touch symlink_to hardlink_to chmod"
)
"""Methods of `Path`. `replace` is among them where it has one argument, which a text's has not."""
OF_MODULES = {
    "os": words(
        "open replace rename renames remove unlink listdir scandir walk fwalk mkdir makedirs rmdir"
        " removedirs symlink link truncate mkfifo mknod chmod"
    ),
    "shutil": words(
        "copy copy2 copyfile copytree copymode move rmtree make_archive unpack_archive"
    ),
    "io": frozenset(["open", "FileIO"]),
    "glob": frozenset(["glob", "iglob"]),
    "sqlite3": frozenset(["connect"]),
    "zipfile": frozenset(["ZipFile"]),
    "tarfile": frozenset(["open", "TarFile"]),
    "gzip": frozenset(["open", "GzipFile"]),
    "bz2": frozenset(["open", "BZ2File"]),
    "torch": frozenset(["load", "save"]),
    "np": frozenset(["load", "save", "fromfile", "memmap"]),
    "numpy": frozenset(["load", "save", "fromfile", "memmap"]),
}
"""Functions of modules that take a path."""
LIBRARIES = words(
    "from_pretrained safe_open load_file save_file EventAccumulator"
    " EventFileLoader DirectoryLoader SummaryWriter EventFileWriter ParquetFile read_table"
    " file_digest"
)
"""Calls of libraries, and of `base/package.py`, that take a path.

A path from `library(…)` is checked already.
"""


@dataclass(frozen=True, slots=True, order=True)
class Use:
    place: str
    """File and function: `base/child.py:replies`."""
    line: int
    call: str


def dotted(node: ast.expr) -> str:
    """The name of a function as written; the part before a call or an index is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    return ""


def is_checked(call: ast.Call) -> bool:
    """Whether an argument of a library comes from `library(…)` of the gate."""
    names = [dotted(each.func) for each in call.args if isinstance(each, ast.Call)]
    return any(name.split(".")[-1] == "library" for name in names)


def is_of_gate(call: ast.Call) -> bool:
    """Whether a function of the gate's module is called by its module's name."""
    return dotted(call.func).startswith("gate.")


def refused(call: ast.Call) -> str:
    """The name of a call that only the gate may make, or an empty text."""
    name = dotted(call.func)
    owner, _, last = name.rpartition(".")
    if is_of_gate(call):
        return ""
    if last in LIBRARIES and owner != "hashlib":
        return "" if is_checked(call) else name
    if owner in OF_MODULES:
        return name if last in OF_MODULES[owner] else ""
    if name == "open":
        return name
    # A method: an owner is a name, a call or an index.
    if isinstance(call.func, ast.Attribute):
        is_path = last in METHODS or (last == "replace" and len(call.args) == 1)
        if is_path and not (last == "replace" and call.keywords):
            return name
    return ""


def imported_bare(tree: ast.Module) -> dict[str, str]:
    """Names that `from shutil import rmtree` gives to functions of modules."""
    bare = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in OF_MODULES:
            for alias in node.names:
                if alias.name in OF_MODULES[node.module]:
                    bare[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bare


def uses(source: str, file: str) -> Iterator[Use]:
    """Every call in a module that only the gate may make."""
    tree = ast.parse(source)
    bare = imported_bare(tree)
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        if isinstance(node, ast.Call):
            call = refused(node) or bare.get(dotted(node.func), "")
            if call:
                yield Use(f"{file}:{function}", node.lineno, call)
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]


@functools.cache
def all_uses() -> list[Use]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file != GATE:
            found += sorted(uses(path.read_text(encoding="utf-8"), file))
    return found


def allowed() -> dict[str, str]:
    """Reason of every allowed function."""
    reasons = {}
    for group in tomllib.loads(ALLOWED.read_text(encoding="utf-8"))["allowed"]:
        for place in group["functions"]:
            assert place not in reasons, f"{place} is listed twice"
            reasons[place] = group["reason"]
    return reasons


def test_only_the_gate_opens_files_of_runs_and_clusters() -> None:
    listed = allowed()
    others = [use for use in all_uses() if use.place not in listed]
    lines = [f"workbench/{use.place}, line {use.line}: {use.call}" for use in others]
    assert not lines, (
        "call a function of workbench/base/files/gate.py instead, or list the function with a "
        f"reason in {ALLOWED.name}:\n" + "\n".join(lines)
    )


def test_the_list_of_allowed_functions_is_as_long_as_needed() -> None:
    used = {use.place for use in all_uses()}
    assert sorted(set(allowed()) - used) == []


def test_every_allowed_function_has_a_reason() -> None:
    for place, reason in allowed().items():
        assert len(reason.split()) >= 5, place


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open('rb')",
        "path.open()",
        "(folder / 'a').read_text()",
        "paths[0].write_bytes(data)",
        "sorted(folder.glob('*'))",
        "list(folder.iterdir())",
        "part.replace(path)",
        "path.unlink(missing_ok=True)",
        "path.symlink_to(other)",
        "os.open(path, os.O_RDONLY)",
        "os.scandir(path)",
        "os.replace(one, other)",
        "shutil.rmtree(path, ignore_errors=True)",
        "from shutil import copyfile as copy\ncopy(one, other)",
        "zipfile.ZipFile(path)",
        "sqlite3.connect(path)",
        "safetensors.torch.load_file(path)",
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(str(path))",
        "EventAccumulator(path)",
        "pq.read_table(path)",
    ],
)
def test_the_refusal_knows_the_call(line: str) -> None:
    assert list(uses(f"def f():\n    {line.replace(chr(10), chr(10) + '    ')}", "x.py"))


@pytest.mark.parametrize(
    "line",
    [
        "gate.remove(path)",
        "open_record(path, root)",
        "text.replace('a', 'b')",
        "replace(record, name='b')",
        "record.replace(job=job)",
        "AutoConfig.from_pretrained(library(path), trust_remote_code=False)",
        "load_file(gate.library(path))",
        "os.close(handle)",
        "path.is_file()",
    ],
)
def test_the_refusal_leaves_other_calls(line: str) -> None:
    assert not list(uses(f"def f():\n    {line}", "x.py"))
