"""The shape of the package: which room may import which, what a bare import costs, what no file may contain."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
FLOORS = (
    {"base", "errors"},
    {"spec", "pods"},
    {"planner", "runs"},
    {"cluster", "jobs"},
    {"results"},
    {"display"},  # draws the records of all rooms below, those of results/ among them
    {"cli"},
)
RECORD_VIEWS = {"display", "results"}  # a record shows and reads itself by a lazy import upwards, the one exception
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ANYWHERE = {"__init__", "__main__"}  # the package's own door: re-exports and `python -m workbench`
FRAMEWORKS = {"torch", "transformers", "deepspeed", "datasets", "accelerate", "tokenizers", "peft", "bitsandbytes"}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(("workbench", *path.relative_to(PACKAGE).with_suffix("").parts))


def room_of(module: str) -> str:
    """`workbench.spec.job` is in the room `spec`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.Module, module: str) -> Iterator[tuple[str, bool, int]]:
    """Each imported module, whether the import stands inside a function, and its line."""
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    typing_only = {
        id(n)
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and ast.unparse(i.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for n in ast.walk(i)
    }
    for node in ast.walk(tree):
        inside = id(node) in lazy or id(node) in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, inside, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.removesuffix(".__init__").split(".")
                package = here if module.endswith(".__init__") else here[:-1]
                base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
            if base == "workbench":
                for alias in node.names:
                    yield f"workbench.{alias.name}", inside, node.lineno
            else:
                yield base, inside, node.lineno


def violations(source: str, module: str) -> list[str]:
    """What `module` imports that its floor does not allow."""
    found = []
    room = room_of(module)
    for name, lazy, line in imports(ast.parse(source), module):
        where = f"{module}:{line} imports {name}"
        top = name.split(".")[0]
        if top in FRAMEWORKS and room != "jobs":
            found.append(f"{where}: only jobs/ may")
        if module.startswith("workbench.jobs.agent") and not (
            top in sys.stdlib_module_names or name.startswith(("workbench.jobs.agent", "workbench.base"))
        ):
            found.append(f"{where}: the agent is standard library only")
        if top != "workbench" or room in ANYWHERE:
            continue
        other = room_of(name)
        if other == room or (other in RECORD_VIEWS and lazy):
            continue
        if FLOOR_OF.get(other, -1) >= FLOOR_OF[room]:
            found.append(f"{where}: {other} is on no lower floor than {room}")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_from_lower_floors(path: Path) -> None:
    module = module_name(path)
    assert room_of(module) in FLOOR_OF or room_of(module) in ANYWHERE, f"{module} is in a room that has no floor"
    assert violations(path.read_text(), module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("workbench.spec.job", "from workbench.pods.pod import Pod"),
        ("workbench.pods.local", "from ..spec import job"),
        ("workbench.runs.keeper", "from workbench import cluster"),
        ("workbench.runs.keeper", "def f():\n    import workbench.cluster"),
        ("workbench.runs.result", "from workbench.display import tables"),
        ("workbench.cluster", "import torch"),
        ("workbench.results.profile", "def f():\n    from transformers import Trainer"),
        ("workbench.jobs.agent.serve", "import psutil"),
        ("workbench.jobs.agent.serve", "from workbench.runs import events"),
    ],
)
def test_the_check_sees_a_wrong_import(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("workbench.runs.result", "def _repr_html_(self):\n    from workbench.display import tables"),
        ("workbench.jobs.train", "import torch\nfrom workbench.runs.events import emit"),
        ("workbench.jobs.agent.serve", "import json\nfrom . import protocol"),
        ("workbench.pods.local", "from workbench.pods.pod import Pod\nfrom workbench.errors import PodError"),
    ],
)
def test_the_check_allows_what_the_design_allows(module: str, source: str) -> None:
    assert violations(source, module) == []


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
            assert ast.get_docstring(node), f"{path.name}:{node.lineno} {node.name} has no docstring"
