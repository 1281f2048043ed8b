"""Shared by all tests: the real data set, if present, and the proof that no process is left."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support.limits import pytest_runtest_teardown, pytest_timeout_set_timer  # noqa: F401
from tests.support.measured import MEASURED
from tests.support.writtenrun import WrittenRun, write_run
from workbench import Cluster, LocalPods, PodSpec
from workbench.pods.doctor import examination
from workbench.pods.hosts import provision

REPOSITORY = Path(__file__).resolve().parent.parent
LEFT_AFTER_S = 300.0
# Folders of tests lie in memory where there is room. On a disk a journal waits for each decision,
# and the tests of journals take four times as long.
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 16 << 30
"""Free memory that is asked: a whole session has 5 GB there, and its processes take 12 GB."""
BROWSER = "tests/browser/"
pytest.register_assert_rewrite(
    "tests.support.forkedruns"
)  # its assertions tell values, as a test's do
# `make test` runs the others, and the quickstart in a browser; `make test-all` these too.
LONG_NOTEBOOKS = tuple(f"{number:02d}_" for number in range(12) if number != 1)

# A shell that starts this in the background has it ignore interrupts, and
# every child with it: tests that interrupt a program would find it deaf.
HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
for number, handler in HANDLERS.items():
    signal.signal(number, handler)


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """Fail the test that leaves a signal ignored, and not the next one that sends the signal."""
    yield
    left = {number.name: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    assert signal.SIG_IGN not in left.values(), left
    assert left["SIGINT"] is signal.default_int_handler, left


# Tests are never timed: hypothesis would fail a test for slow examples on a machine under load.
# Every run of CI tries the same examples; `pytest --hypothesis-profile=random` tries others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")


# Under `--no-processes`, which `make check` uses, a
# test is left out as soon as it starts a process.
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
WITH_PROCESSES = ("slow", "long", "notebook", "browser", "images", "kubernetes")
# Share of a test in the time of its file, by its marks.
WEIGHTS = {"notebook": 10, "long": 5, "slow": 1}
# Folders whose tests start daemons and wait for leases, time limits and schedulers.
WAITING = ("faults", "pods")
# Share of the order over which the files of a group are spread. The waiting ones take minutes, so
# none of them comes last.
SPANS = {"heavy": 1.0, "waiting": 0.8, "light": 1.0}


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "leave out tests that are marked as slow, and skip others once they start a process"
    parser.addoption("--no-processes", action="store_true", help=words)
    words = "try the contract suite with every login shell and output"
    parser.addoption("--every-login", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-processes"):
        sys.addaudithook(refuse_processes)
    free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    if min(free, psutil.virtual_memory().available) > MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def refuse_processes(event: str, _args: object) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "")  # unset while tests are collected
    if event in STARTS and test:
        pytest.skip(f"it starts a process ({event})")


# What is imported and collected stays: to look for garbage in it costs a third of that time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # nor do later collections look at it again
    # Tests make much and keep little: to look for garbage this seldom spares a tenth of the time.
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real WikiSQL questions beside a developer's checkout; else skip the test."""
    folder = REPOSITORY.parent / "shared" / "data" / "wikisql"
    if not (folder / "train.jsonl").is_file():
        pytest.skip(
            "needs the real WikiSQL rows: ../shared/data/wikisql beside the checkout is not there"
        )
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
        if int(folder.name) != os.getpid() and any(
            mark.encode() in argv + environ for mark in marks
        ):
            found.append(
                f"{folder.name} "
                f"{argv.replace(bytes(1), b' ').decode(errors='replace').strip()[:150]}"
            )
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session when a keeper, sshd, agent or rank of a test outlives all tests."""
    mark = f"WORKBENCH_TEST_SESSION={uuid.uuid4().hex}"
    os.environ.update([mark.split("=")])
    # Keys and sockets of the clusters of this session lie in a folder of its own, and go with it:
    # two sessions never meet, and nothing stays in the user's own folder. The path of a socket has
    # about a hundred bytes, so the folder is not below pytest's.
    states = tempfile.mkdtemp(prefix="wb-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    os.environ["XDG_STATE_HOME"] = states
    # A pod looks for locks of builds where its ops are compiled, and others may build theirs.
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{states}/torch_extensions"
    yield
    if (forked := sys.modules.get("tests.support.forkedruns")) is not None:
        forked.end_parent()
    if (slurm := sys.modules.get("tests.fakes.slurmplace")) is not None:
        slurm.end_slurm()
    if (kubernetes := sys.modules.get("tests.pods.controlplane.server")) is not None:
        kubernetes.end_control_plane()
    # What a login on a pod starts has a fresh environment: it
    # is known by a path of this session's in its arguments.
    left = left_after(mark, f"{tmp_path_factory.getbasetemp()}/")
    shutil.rmtree(states, ignore_errors=True)
    assert not left, "still running after the tests:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def limits_are_of_a_busy_machine() -> Iterator[None]:
    """Give hosts the time for an answer that a busy machine takes; silent ones end it sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "_HOST_S", 300.0)
        patch.setattr(provision, "_REMOVE_S", 300.0)
        yield


@pytest.fixture(autouse=True)
def outlines_are_made_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare a process with transformers the child that would import transformers again."""
    if "transformers" not in sys.modules or "outline_in_a_child" in request.fixturenames:
        return
    from workbench.finetune.job import outlined
    from workbench.finetune.model.outline import answer

    monkeypatch.setattr(outlined, "replies", lambda _, *, request, **__: [answer(request)])


@pytest.fixture
def outline_in_a_child() -> None:
    """Make outlines of models in a child in this test."""


def left_after(*marks: str) -> list[str]:
    """Processes with one of the marks that do not end within some time, one line each."""
    deadline = time.monotonic() + LEFT_AFTER_S
    while (left := processes_with(*marks)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark the notebooks, which carry no marks of their own; order the tests that are left."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("notebook")
            if item.path.name.startswith(LONG_NOTEBOOKS) or item.path.parent.name == "walkthroughs":
                item.add_marker("long")
    if config.getoption("--no-processes"):
        started = [item for item in items if any(map(item.get_closest_marker, WITH_PROCESSES))]
        config.hook.pytest_deselected(items=started)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, WITH_PROCESSES))]
    yield
    order_files(items)


def order_files(items: list[pytest.Item]) -> None:
    """Order the files for pytest-xdist, which keeps the order with `--no-loadscope-reorder`.

    Heavy files begin early, so that none comes last and leaves the other processes idle. Files
    that mostly wait come between them, so that the cores never wait with all processes at once.
    """
    weights: Counter[Path] = Counter()
    for item in items:
        marks = [mark for mark in WEIGHTS if item.get_closest_marker(mark)]
        weights[item.path] += sum(WEIGHTS[mark] for mark in marks)
    groups: dict[str, list[Path]] = {"heavy": [], "waiting": [], "light": []}
    for path, weight in weights.most_common():
        group = "light" if not weight else "waiting" if path.parent.name in WAITING else "heavy"
        groups[group].append(path)
    places = {
        path: SPANS[group] * number / len(paths)
        for group, paths in groups.items()
        for number, path in enumerate(paths)
    }
    items.sort(key=lambda item: (places[item.path], item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Keep the files of tests/browser in one process: one JupyterLab serves all of them."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return BROWSER if file.startswith(BROWSER) else file

    return Scheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand on the measured figures; the receiver looks after the notebooks' shared folder."""
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker["measured"] = list(MEASURED)
    elif left := left_after(
        *(f"{REPOSITORY}/{folder}/runs/" for folder in ("notebooks", "docs/walkthroughs"))
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        MEASURED.extend(["still running after the notebooks:", *left])
    elif session.exitstatus == pytest.ExitCode.OK:
        free_memory(session.config)


def free_memory(config: pytest.Config) -> None:
    """Remove the folders of tests that all passed, which take memory.

    Not after each test, as pytest can: a test's patches of `os` may be in place until then.
    """
    folder = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    if folder.is_relative_to(MEMORY):
        shutil.rmtree(folder, ignore_errors=True)


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


@pytest.fixture(scope="session")
def shared_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two warm pods of this machine that the tests of a worker share.

    A test leaves the pods as they were. Tests that kill a process of a cluster, close a
    cluster or ask for other pods start a cluster of their own.
    """
    path = tmp_path_factory.mktemp("shared") / "cluster"
    hour_s = 3600.0
    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=2, path=path, idle_timeout_s=hour_s
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(shared_pods: Cluster) -> Cluster:
    """The shared pods. A file whose tests need pods of their own overrides this fixture."""
    return shared_pods


@pytest.fixture(autouse=True)
def shared_pods_are_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a run on the shared pods: the next test would wait for it."""
    yield
    if "shared_pods" in request.fixturenames:
        pods = request.getfixturevalue("shared_pods")
        busy = [run.id for run in pods.runs if not run.state.is_terminal]
        assert not busy, f"still on the shared pods: {busy}"
        assert {pod.phase for pod in pods.pods} == {"Running"}


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    """A run directory as the keeper writes it, waiting to be filled."""
    return write_run(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., WrittenRun]:
    """Makes such a run directory for a given job."""
    return lambda job: write_run(tmp_path, job)
