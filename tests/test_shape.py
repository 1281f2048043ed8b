"""The shape of the package: what a bare import costs, what no file may contain.

Which room may import which is a contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
FRAMEWORKS = {"torch", "transformers", "deepspeed", "datasets", "accelerate", "tokenizers", "peft", "bitsandbytes"}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(("workbench", *path.relative_to(PACKAGE).with_suffix("").parts))


def test_bare_import_is_fast_and_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import workbench; "
        "print(time.process_time() - start, *sorted({m.split('.')[0] for m in sys.modules}))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    seconds = min(float(run.stdout.split()[0]) for run in runs)
    loaded = set(runs[0].stdout.split()[1:])
    assert loaded & (FRAMEWORKS | {"kubernetes", "paramiko", "ipywidgets", "IPython", "tensorboard"}) == set()
    assert seconds < 0.5


def test_public_names_exist_and_need_no_framework() -> None:
    code = "import sys, workbench; [getattr(workbench, name) for name in workbench.__all__]; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) & FRAMEWORKS == set()


def shell_calls(source: str) -> list[str]:
    """Calls that hand a string to a shell, or name processes by a pattern."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"):
            found.append(f"line {node.lineno}: {name}")
        if any(
            k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in node.keywords
        ):
            found.append(f"line {node.lineno}: shell=")
        if name.endswith("exec_command") and node.args and isinstance(node.args[0], ast.JoinedStr):
            found.append(f"line {node.lineno}: f-string into exec_command")
        if any(isinstance(a, ast.Constant) and a.value in ("pkill", "killall") for n in node.args for a in ast.walk(n)):
            found.append(f"line {node.lineno}: kills by name")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_shell_strings(path: Path) -> None:
    assert shell_calls(path.read_text()) == []


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
    assert len(shell_calls(source)) == 1


def test_one_file_alone_reads_a_pickle_and_pods_run_it() -> None:
    readers = {f"{room}.{name}" for room in ("pickle", "cloudpickle") for name in ("load", "loads", "Unpickler")}
    calls = {
        (module_name(path), ast.unparse(node.func))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in readers
    }
    assert calls == {("workbench.worker.call", "pickle.loads")}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_can_be_read_in_one_sitting(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 320, f"{path.name} has {text.count(chr(10))} lines: a wall to move"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{path.name}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_public_names_say_what_they_do(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.name} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list):
                continue  # what follows them has it
            assert ast.get_docstring(node), f"{path.name}:{node.lineno} {node.name} has no docstring"


def test_methods_of_what_is_exported_say_what_they_do() -> None:
    exported = [each for name in workbench.__all__ if inspect.isclass(each := getattr(workbench, name))]
    members = [
        (owner, name, member)
        for each in exported
        for owner in each.__mro__
        if owner.__module__.startswith("workbench")
        for name, member in vars(owner).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod | staticmethod))
    ]
    assert len(members) > 100
    assert [f"{owner.__name__}.{name}" for owner, name, member in members if not inspect.getdoc(member)] == []
