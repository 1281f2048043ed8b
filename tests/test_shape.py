"""The shape of the package: what a bare import costs, what no file may contain.

Which room may import which is a contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from tools.options import MODULES, PUBLIC

PACKAGE = Path(workbench.__file__).parent
FRAMEWORKS = {
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "accelerate",
    "tokenizers",
    "peft",
    "bitsandbytes",
}
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    return ".".join(("workbench", *path.relative_to(PACKAGE).with_suffix("").parts))


MOST_MODULES = 64


def test_a_bare_import_is_light() -> None:
    code = (
        "import sys; before = {*sys.modules}; import workbench; "
        "print(*sorted({*sys.modules} - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = run.stdout.split()
    loaded = {module.partition(".")[0] for module in modules}
    heavy = {"kubernetes", "paramiko", "ipywidgets", "IPython", "tensorboard"}
    assert loaded & (FRAMEWORKS | heavy) == set()
    # Python compiles nothing here but reads each module, so their number is what a user waits for.
    assert len(modules) < MOST_MODULES, modules


def test_public_names_exist_and_need_no_framework() -> None:
    code = (
        "import sys, workbench; [getattr(workbench, name) for name in workbench.__all__]; "
        + "".join(f"import workbench.{module}; " for module in MODULES)
        + "print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) & FRAMEWORKS == set()


def dotted(node: ast.expr) -> str:
    """What is called, as it is written; `ast.unparse` of every call takes seconds."""
    match node:
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
        case ast.Name():
            return node.id
    return "?"


def shell_calls(tree: ast.Module) -> list[str]:
    """Calls that hand a string to a shell, or name processes by a pattern."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("pkill", "killall"):
            found.append(f"line {node.lineno}: kills by name")
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"):
            found.append(f"line {node.lineno}: {name}")
        if any(
            k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value)
            for k in node.keywords
        ):
            found.append(f"line {node.lineno}: shell=")
        if name.endswith("exec_command") and node.args and isinstance(node.args[0], ast.JoinedStr):
            found.append(f"line {node.lineno}: f-string into exec_command")
    return found


def test_no_shell_strings() -> None:
    assert {
        module_name(path): calls for path in FILES if (calls := shell_calls(parsed(path)))
    } == {}


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.system('ls')",
        "import os; os.popen('ls')",
        "subprocess.run(cmd, shell=True)",
        "subprocess.run(cmd, shell=flag)",
        "client.exec_command(f'ls {path}')",
        "subprocess.run(['pkill', '-f', name])",
    ],
)
def test_the_scan_sees_a_shell(source: str) -> None:
    assert len(shell_calls(ast.parse(source))) == 1


def test_every_room_that_make_check_tests_or_leaves_out_is_there() -> None:
    root = PACKAGE.parent
    asked = subprocess.run(
        ["make", "-s", "--eval", "checked: ; @echo $(CHECKED) $(NOT_CHECKED)", "checked"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    rooms = asked.stdout.split()
    assert "tests/base" in rooms
    assert [room for room in rooms if not (root / room).exists()] == []


def test_one_file_alone_reads_a_pickle_and_pods_run_it() -> None:
    readers = {
        f"{room}.{name}"
        for room in ("pickle", "cloudpickle")
        for name in ("load", "loads", "Unpickler")
    }
    calls = {
        (module_name(path), dotted(node.func))
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and dotted(node.func) in readers
    }
    assert calls == {("workbench.agent.call", "pickle.loads")}


def test_files_and_what_is_exported_say_what_they_are() -> None:
    silent = [str(path) for path in FILES if not ast.get_docstring(parsed(path))]
    for path, value in PUBLIC.items():
        name = path.rpartition(".")[2]
        text = inspect.getdoc(value) or ""
        silent += (
            [name] if not text or text.startswith(f"{name}(") else []
        )  # what a dataclass writes for itself
    assert silent == []


def test_methods_of_what_is_exported_say_what_they_do() -> None:
    exported = [each for each in PUBLIC.values() if inspect.isclass(each)]
    members = [
        (owner, name, member)
        for each in exported
        for owner in each.__mro__
        if owner.__module__.startswith("workbench")
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and (callable(member) or isinstance(member, property | classmethod | staticmethod))
    ]
    assert len(members) > 100
    assert [
        f"{owner.__name__}.{name}" for owner, name, member in members if not inspect.getdoc(member)
    ] == []


def test_no_test_is_skipped_for_a_package_that_make_setup_installs() -> None:
    """A broken environment must fail, and not leave out the trainer's tests."""
    skip = "import" + "orskip"
    tests = PACKAGE.parent / "tests"
    assert [str(path) for path in tests.rglob("*.py") if skip in path.read_text()] == []


def test_twenty_names_stand_in_the_package_and_every_other_name_in_one_module() -> None:
    assert len(workbench.__all__) <= 20
    elsewhere = {
        module: sorted(importlib.import_module(f"workbench.{module}").__all__) for module in MODULES
    }
    assert {module: sorted(names) for module, names in workbench._ELSEWHERE.items()} == elsewhere
    names = [path.rpartition(".")[2] for path in PUBLIC]
    assert len(set(names)) == len(names)
    # `from workbench import NAME` falls back to a module of the name.
    assert {*names} & {*MODULES} == set()


def test_an_import_from_the_package_names_the_module_of_the_name() -> None:
    with pytest.raises(ImportError, match=r"^parse_sql is in workbench\.wikisql;"):
        from workbench import parse_sql  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from workbench import nothing  # noqa: F401
