"""Shared by all tests: the real data set where it is present, and the proof that nothing of ours is left running."""

from __future__ import annotations

import gc
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from measured import MEASURED
from writtenrun import WrittenRun, write_run

REPOSITORY = Path(__file__).resolve().parent.parent
LEFT_AFTER_S = 60.0
# The files that take longest, from half a minute of CPU up. Tests run in three processes, which share the files among
# them: the long ones begin early, so that none comes last and leaves the others with nothing to do, and with short ones
# between, which mostly wait and leave the two cores to the long.
LONG = (
    "tests/worker/test_train.py",
    "tests/test_cluster.py",
    "tests/browser/test_cockpit.py",
    "tests/test_cli.py",
    "notebooks/00_quickstart.ipynb",
    "notebooks/08_llama_qlora.ipynb",
    "notebooks/06_benchmark.ipynb",
    "tests/pods/test_contract.py",
    "tests/planner/test_measured.py",
    "tests/results/test_modelserver.py",
    "tests/test_places.py",
    "tests/results/test_recipe.py",
    "notebooks/07_llama_fsdp.ipynb",
    "tests/faults/test_launchers.py",
    "tests/worker/test_adapters.py",
    "notebooks/03_deepspeed_zero1.ipynb",
    "notebooks/05_run_inference.ipynb",
    "tests/worker/test_checkpoints.py",
    "tests/faults/test_pods.py",
    "tests/browser/test_bounds.py",
    "tests/test_resume.py",
)

# A shell that starts this in the background has it ignore interrupts, and every child with it: tests that interrupt
# a program would find it deaf.
signal.signal(signal.SIGINT, signal.default_int_handler)


# What is imported and collected stays: looking for garbage among it costs a third of that time, in each process.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real WikiSQL questions beside a developer's checkout; the test is skipped where there is none."""
    folder = REPOSITORY.parent / "shared" / "data" / "wikisql"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("needs the real WikiSQL rows: ../shared/data/wikisql beside the checkout is not there")
    return folder


def processes_with(*marks: str) -> list[str]:
    """Other processes whose arguments or environment hold one of the marks, one line each."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv = (folder / "cmdline").read_bytes()
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is another user's
        if int(folder.name) != os.getpid() and any(mark.encode() in argv + environ for mark in marks):
            found.append(f"{folder.name} {argv.replace(bytes(1), b' ').decode(errors='replace').strip()[:150]}")
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session when a keeper, sshd, agent or rank that a test started outlives all tests."""
    mark = f"WORKBENCH_TEST_SESSION={uuid.uuid4().hex}"
    os.environ.update([mark.split("=")])
    yield
    # What a login on a pod starts has a fresh environment: it is known by a path of this session's in its arguments.
    left = left_after(mark, f"{tmp_path_factory.getbasetemp()}/")
    assert not left, "still running after the tests:\n" + "\n".join(left)


def left_after(*marks: str) -> list[str]:
    """Processes with one of the marks that do not end within some time, one line each."""
    deadline = time.monotonic() + LEFT_AFTER_S
    while (left := processes_with(*marks)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the long files among the short ones; `--no-loadscope-reorder` has pytest-xdist keep the order."""
    files = list(dict.fromkeys(item.path for item in items))
    long = [path for name in LONG if (path := REPOSITORY / name) in files]
    short = [path for path in files if path not in long]
    between = 1 + len(short) // max(1, len(long))
    order: list[Path] = []
    while long or short:
        order += [*long[:1], *short[:between]]
        long, short = long[1:], short[between:]
    places = {path: place for place, path in enumerate(order)}
    items.sort(key=lambda item: places[item.path])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand on what was measured; the process that gets it looks after the notebooks, which share one folder."""
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker["measured"] = list(MEASURED)
    elif left := left_after(f"{REPOSITORY}/notebooks/runs/"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        MEASURED.extend(["still running after the notebooks:", *left])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Gather what a process of pytest-xdist measured."""
    MEASURED.extend(getattr(node, "workeroutput", {}).get("measured", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print it."""
    if MEASURED:
        terminalreporter.section("measured on the way")
        for line in MEASURED:
            terminalreporter.write_line(line)


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    """A run directory as the keeper writes it, waiting to be filled."""
    return write_run(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., WrittenRun]:
    """Makes such a run directory for a given job."""
    return lambda job: write_run(tmp_path, job)
