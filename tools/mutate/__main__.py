"""Change one operator, constant or assignment at a time, and name the changes that no test notices.

`make mutate` tries the modules that differ from a commit. Tests are collected once. One pass notes
which test runs which line; then a forked child tries each mutant with the tests of its line, the
quickest first, until one fails. Code outside of functions is not changed, as it has already run.
Tests that start a process are left out: lines that they alone run have "no test".
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tools.mutate.faults import compiled, mutants_of

_VERDICTS = ("killed", "survived", "timed out", "no test", "equivalent")
KILLED, SURVIVED, TIMED_OUT, UNSEEN, EQUIVALENT = _VERDICTS
_MEMORY_BYTES = 4 << 30
_EQUIVALENT = Path(__file__).with_name("equivalent.toml")
# Tests of a folder of the package, where their folder has another name. The longest match counts.
_TESTS = {
    "workbench/finetune": ("tests/jobs", "tests/finetune", "tests/test_methods.py"),
    "workbench/finetune/plan": ("tests/finetune/plan", "tests/jobs"),
    "workbench/handover": ("tests/finetune/results", "tests/jobs"),
    "workbench/__init__.py": ("tests/test_shape.py",),
    "workbench/__main__.py": ("tests/test_cli.py",),
    "workbench/cli.py": ("tests/test_cli.py", "tests/verify"),
}


def main() -> int:
    args = _parser().parse_args()
    files = args.files or changed(args.base)
    if not files:
        print(f"no module of the package differs from {args.base}")
        return 0
    failed = False
    # The modules of a set of tests share one collection.
    by_tests: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        by_tests.setdefault(tuple(args.tests or tests_of(file)), []).append(file)
    for tests, modules in by_tests.items():
        trial = Trial(modules, args.limit, args.most, args.least)
        with tempfile.TemporaryDirectory() as folder:
            # Without the terminal's plugin pytest knows no -r, which the project's settings have.
            words = ["-s", "-o", "addopts=", "--import-mode=importlib", "--no-processes"]
            words += [f"--basetemp={folder}/pytest"]
            for plugin in ("terminal", "cacheprovider", "kmock", "asyncio", "xdist", "nbmake"):
                words += ["-p", f"no:{plugin}"]
            code = pytest.main([*words, *tests], plugins=[trial])
        failed |= trial.failed or code != pytest.ExitCode.OK
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="modules; default: those that differ")
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with")
    parser.add_argument("--tests", nargs="+", help="tests; default: those of the module's folder")
    parser.add_argument("--limit", type=float, default=20, help="seconds for the tests of a mutant")
    parser.add_argument(
        "--most", type=int, default=10_000, help="mutants of a module, evenly drawn"
    )
    parser.add_argument(
        "--least", type=float, default=85, help="percent to be killed of those tried"
    )
    return parser


def changed(base: str) -> list[Path]:
    """Return the modules of the package that differ from a commit."""
    asked = ["git", "diff", "--name-only", "--diff-filter=d", base, "--", "workbench"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")
    return [Path(name) for name in listed if name.endswith(".py")]


def tests_of(file: Path) -> Sequence[str]:
    """Return the tests of a module: of the longest known folder, else of the room's name."""
    known = [name for name in _TESTS if file.is_relative_to(name)]
    if known:
        return _TESTS[max(known, key=len)]
    return [f"tests/{file.parts[1]}"]


class Trial:
    """Plugin of pytest that tries mutants instead of running the collected tests."""

    def __init__(self, modules: Sequence[Path], limit_s: float, most: int, least: float):
        self._modules = {str(module.resolve()): module for module in modules}
        self._limit_s = limit_s
        self._most = most
        self._least = least
        self._tests: list[dict[str, Any]] = []
        self.failed = False
        known = tomllib.loads(_EQUIVALENT.read_text())["mutant"]
        self._equivalent = {(each["module"], each["line"], each["change"]) for each in known}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            print("the tests cannot be collected; run them with pytest first")
            self.failed = True
            return True
        # A child for each file: a test that ends its process costs no other file.
        files: dict[Path, list[int]] = {}
        for number, item in enumerate(session.items):
            files.setdefault(item.path, []).append(number)
        failed = []
        for file, numbers in files.items():
            answer = forked(partial(self._watched, session.items, numbers))
            watched = json.loads(answer or json.dumps({"tests": [], "failed": [file.name]}))
            self._tests += watched["tests"]
            failed += watched["failed"]
        if failed:
            print(
                f"left out, because they fail or end their process without a change: {failed}",
                flush=True,
            )
        self._tests.sort(key=lambda test: float(test["s"]))
        for path, module in self._modules.items():
            self._try(session.items, path, module)
        return True

    def _watched(self, items: Sequence[pytest.Item], numbers: Sequence[int]) -> str:
        """Run some tests; return the seconds and the lines of each that runs any line."""
        tests, failed = [], []
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            item = items[number]
            after = None if following is None else items[following]
            lines: dict[str, set[int]] = {path: set() for path in self._modules}
            began_s = time.perf_counter()
            with traced(lines):
                outcomes = outcomes_of(item, after)
            if "failed" in outcomes:
                failed.append(item.nodeid)
            elif "skipped" not in outcomes and any(lines.values()):
                seen = {path: sorted(ran) for path, ran in lines.items()}
                tests.append({"item": number, "s": time.perf_counter() - began_s, "lines": seen})
        return json.dumps({"tests": tests, "failed": failed})

    def _try(self, items: Sequence[pytest.Item], path: str, module: Path) -> None:
        source = module.read_text()
        lines = source.splitlines()
        mutants = mutants_of(source)
        counts: Counter[str] = Counter()
        began_s = time.monotonic()
        for mutant in mutants[:: max(1, -(-len(mutants) // self._most))]:
            seeing = [test for test in self._tests if {*mutant.lines} & {*test["lines"][path]}]
            verdict = UNSEEN
            line = lines[mutant.lines[-1] - 1].strip()
            if (str(module), line, str(mutant)) in self._equivalent:
                verdict = EQUIVALENT
            elif seeing:
                code = compiled(source, path, mutant.number)
                verdict = self._verdict(path, code, [items[test["item"]] for test in seeing])
            counts[verdict] += 1
            if verdict in (SURVIVED, TIMED_OUT):
                print(f"{module}:{mutant.lines[-1]}: {verdict}: {mutant}", flush=True)
        decided = counts[KILLED] + counts[SURVIVED]
        share = 100 * counts[KILLED] / decided if decided else 100.0
        figures = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS)
        took = f"{time.monotonic() - began_s:.0f} s"
        print(f"{module}: {figures}; {share:.0f} % of those decided; {took}", flush=True)
        self.failed |= share < self._least

    def _verdict(self, path: str, code: CodeType, items: Sequence[pytest.Item]) -> str:
        def work() -> str:
            try:
                replace_code(path, code)
            except ValueError:  # a function of the mutant closes over other variables
                return UNSEEN
            following = [*items[1:], None]
            failed = any(
                "failed" in outcomes_of(*each) for each in zip(items, following, strict=True)
            )
            return KILLED if failed else SURVIVED

        try:
            # A child that ended without an answer was ended by its mutant.
            return forked(work, self._limit_s) or KILLED
        except TimeoutError:
            return TIMED_OUT


def outcomes_of(item: pytest.Item, following: pytest.Item | None) -> set[str]:
    """Run a test, and tear down all that the following one does not share."""
    after: Any = item.parent if following is None else following
    return {report.outcome for report in runtestprotocol(item, log=False, nextitem=after)}


def forked(work: Callable[[], str], limit_s: float | None = None) -> str:
    """Return the answer of a function from a child, "" if it ends without one.

    Raises:
        TimeoutError: The child took longer than the limit and was ended.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _carry_out(work, writing)
    os.close(writing)
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    pieces = []
    try:
        while True:
            left_s = None if deadline_s is None else max(0, deadline_s - time.monotonic())
            if not select.select([reading], [], [], left_s)[0]:
                raise TimeoutError
            if not (piece := os.read(reading, 1 << 16)):
                return b"".join(pieces).decode()
            pieces.append(piece)
    finally:
        os.close(reading)
        # The child leads its group: what it started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _carry_out(work: Callable[[], str], writing: int) -> NoReturn:
    """Write the answer of a function and end this process, whatever the function does."""
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
        answer = work().encode()
        with os.fdopen(writing, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


@contextlib.contextmanager
def traced(lines: dict[str, set[int]]) -> Iterator[None]:
    """Note the lines that run in the files, in all threads that begin meanwhile."""

    def look(frame: FrameType, _event: str, _arg: object) -> Any:
        ran = lines.get(frame.f_code.co_filename)
        if ran is None:
            return None

        def note(inner: FrameType, event: str, _arg: object) -> Any:
            if event == "line":
                ran.add(inner.f_lineno)
            return note

        return note

    threading.settrace(look)
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def replace_code(path: str, module: CodeType) -> None:
    """Give the functions of an imported module the code of its mutant, wherever they are held."""
    codes: dict[tuple[str, int], CodeType] = {}
    waiting = [module]
    while waiting:
        code = waiting.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    gc.unfreeze()
    for held in gc.get_objects():
        if isinstance(held, FunctionType) and held.__code__.co_filename == path:
            code = held.__code__
            held.__code__ = codes.get((code.co_qualname, code.co_firstlineno), code)


if __name__ == "__main__":
    sys.exit(main())
