"""Kinds of jobs by name, and one of another package that runs on two real pods."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.sentences import says
from tests.support.writtenrun import WrittenRun
from workbench import Benchmark, Cluster, FineTune, LocalPods, PodSpec, Script, history
from workbench.base import entries
from workbench.base.display_protocol import as_text
from workbench.base.errors import ConfigError
from workbench.base.record import Record
from workbench.benchmark.grid import make_grid
from workbench.benchmark.row import Outcome
from workbench.display.kit.doc import blocks_html
from workbench.display.kit.plots.runs import curve_plot
from workbench.display.run.facts import RunFacts
from workbench.display.run.page import run_view_doc
from workbench.jobs import registry
from workbench.jobs.job import COMMON, Job, Rules
from workbench.keeper.run.stage import sent_inputs
from workbench.rundir.events import STATE_EVENTS, EventKind
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

ROOT = Path(__file__).resolve().parents[2]


def guide() -> dict[str, str]:
    """Files of the package that the page `docs/extending.md` shows."""
    page = (ROOT / "docs" / "extending.md").read_text()
    files = re.findall(r"^`([\w.]+)` [^\n]*:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["pyproject.toml", "greetings.py"]
    return dict(files)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stand for an installed package: its module, and the metadata that holds its entry points."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("countkind.py"), site)
    info = site / "countkind-1.0.dist-info"
    info.mkdir()
    for name, text in guide().items():
        (site / name).write_text(text)
    project = tomllib.loads((site / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["workbench.jobs"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: countkind\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[workbench.jobs]\n"
        "count = countkind:Counting\n"
        "absent = countkind:Nothing\n"
        "alien = pathlib:Path\n"
        "script = countkind:Counting\n"
        + "".join(f"{kind} = {place}\n" for kind, place in points.items())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", str(site))  # for the keeper, as site-packages would be
        yield site
    for name in ("countkind", "greetings"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("c") / "cluster"
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=path, warm=False) as cluster:
        yield cluster


def counting(**options: object) -> Job:
    return registry.job_from_dict({"kind": "count", **options})


def test_every_built_in_kind_is_registered_under_its_own_word() -> None:
    for kind in entries.JOBS:
        assert registry.job_class(kind).kind == kind
    assert registry.job_class("script") is Script
    assert type(registry.job_from_dict({})) is FineTune


def test_an_unknown_kind_is_refused_with_the_kinds_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'dpo'.*finetune.*script|'dpo'.*count") as refused:
        registry.job_from_dict({"kind": "dpo"})
    assert all(kind in str(refused.value) for kind in ("count", "finetune", "script"))


def test_packages_are_read_again_only_after_one_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads: list[str] = []

    def read(group: str) -> list[EntryPoint]:
        reads.append(group)
        return [EntryPoint(f"kind{len(reads)}", "mine:Kind", group)]

    monkeypatch.setattr(registry, "entry_points", read)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(3):
        assert "kind1" in registry.kinds()
    (tmp_path / "other-1.0.dist-info").mkdir()
    assert "kind2" in registry.kinds()
    assert len(reads) == 2


def test_another_package_cannot_replace_a_built_in_kind() -> None:
    assert registry.kinds()["script"] == entries.JOBS["script"]
    assert registry.job_class("script") is Script


@pytest.mark.parametrize(("kind", "place"), [("absent", "Nothing"), ("alien", "pathlib:Path")])
def test_a_wrong_entry_point_is_named(kind: str, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        registry.job_class(kind)


def test_a_kind_that_lacks_an_option_or_a_verb_is_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="launcher, env, restarts, stall_timeout_s"):
        type("Bare", (Job,), {"kind": "bare", "__module__": __name__})
    options = {name: Script.__annotations__[name] for name in COMMON}
    defaults = {"launcher": "ssh", "env": {}, "restarts": 0, "stall_timeout_s": None}
    body = {"kind": "idle", "__module__": "workbench.jobs.script", "__annotations__": options}
    idle = type("Idle", (Job,), {**body, **defaults})
    with pytest.raises(TypeError, match=r"prepare.*program_on"):
        idle()


@pytest.mark.filterwarnings("ignore:Field name")
def test_an_option_that_would_hide_a_member_of_every_job_is_refused() -> None:
    body = {"__module__": "workbench.jobs.script", "__annotations__": {"rules": "str"}}
    with pytest.raises(TypeError, match=r"Hides.*rules"):
        type("Hides", (Script,), {**body, "rules": ""})


MEMBERS = {
    "traits",
    "rules",
    "views",
    "batch_on",
    "found_in",
    "chosen",
    "on_ranks",
    "prepare",
    "archive_in",
    "folder_name",
    "needed",
    "packages_in",
    "files_for",
    "fetch_for_pods",
    "program_on",
    "resumed",
    "restarted_from",
    "in_users_files",
    "handed_over",
}
"""Members of `Job` besides the four common options, and besides `kind` and `label` of a record."""


def test_the_interface_of_a_job_has_these_members_alone() -> None:
    of_record = {name for name in dir(Record) if not name.startswith("_")}
    assert {name for name in dir(Job) if not name.startswith("_")} - of_record == MEMBERS


def test_a_kind_that_brings_what_is_required_has_the_rest() -> None:
    job = counting(restarts=2)
    assert job.rules.capped(7) == 7 and Rules(most_ranks=3).capped(7) == 3
    assert Rules(most_ranks=3).capped(2) == 2
    assert job.batch_on(2) is None
    assert job.views.word == "count"
    assert job.views.facts == {"technique": "count", "model": "", "launcher": "ssh"}
    assert job.views.in_grid({"upto": 3}, pods=1, slots=1) == counting(restarts=2, upto=3)
    assert job.views.forecast(pods=1, gpus=0) is None
    assert sent_inputs(job, RunPaths(Path("run"))) == "inputs"


def test_only_a_fine_tuning_job_may_send_state_events() -> None:
    # No job may send samples: they are the keeper's, in a file of their own.
    assert FineTune.traits.events == STATE_EVENTS - {EventKind.SAMPLE}
    assert not Script.traits.events


def test_a_job_of_another_package_is_a_row_of_a_grid() -> None:
    grid = make_grid([counting(), FineTune()], ["single", "ddp"], [1, 2], {"restarts": [0, 1]})
    assert [row.name for row in grid.rows if row.job.kind == "count"] == [
        "count on 1 pod, restarts 0",
        "count on 2 pods, restarts 0",
        "count on 1 pod, restarts 1",
        "count on 2 pods, restarts 1",
    ]
    assert "tiny-t5, ddp on 2 pods, restarts 1" in [row.name for row in grid.rows]
    own = make_grid([counting()], vary={"upto": [2, 3], "say": ["n"]})
    assert [(row.name, row.job) for row in own.rows] == [
        ("count on 1 pod, upto 2", counting(upto=2)),
        ("count on 1 pod, upto 3", counting(upto=3)),
    ]
    with pytest.raises(ConfigError, match="global_batch_size"):
        make_grid([counting()], vary={"global_batch_size": [8]})


def test_a_job_of_another_package_has_a_forecast_that_says_what_is_unknown(tmp_path: Path) -> None:
    forecast = Benchmark([counting()], pods=[2], path=tmp_path / "b").forecast()
    assert (forecast.runs, forecast.to_go) == (1, 1)
    assert forecast.rows[0].memory.gib is None
    assert "memory of a count job is not predicted" in forecast.rows[0].memory.unknown
    assert "count on 2 pods" in as_text(forecast)


def test_the_panel_of_a_job_of_another_package_has_its_facts(
    write: Callable[..., WrittenRun],
) -> None:
    written = write({"kind": "count", "upto": 3})
    written.state("starting", "starting ranks")
    view = RunView(written.paths.root)
    facts = RunFacts(view)
    assert ("job", "count") in facts.head
    assert not {"model", "technique", "script"} & {name for name, _ in facts.head}
    assert (facts.share, facts.bar) == (0.0, "starting ranks")
    assert (facts.stop_grace_s, facts.has_only_log) == (5.0, True)
    written.state("running", "running")
    written.sample(rss_gib=0.5)
    view.refresh()
    assert "the ranks have printed nothing yet" in blocks_html(run_view_doc(view).blocks)
    assert curve_plot(view).y == "loss"
    assert [record.technique for record in history(written.paths.root.parent).records] == ["count"]


@pytest.mark.slow
def test_a_benchmark_runs_jobs_of_another_package_and_finds_them_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    grid = Benchmark([counting(upto=2)], ["single", "ddp"], pods=[1, 2], path=tmp_path / "b")
    table = grid.run(cluster)
    assert [(row.outcome, row.technique, row.pods, row.world_size) for row in table.rows] == [
        (Outcome.SUCCEEDED, "count", 1, 1),
        (Outcome.SUCCEEDED, "count", 2, 2),
    ]
    assert [row.from_disk for row in grid.run(cluster).rows] == [True, True]
    assert "2 rows, 2 succeeded" in repr(table)
    assert "count" in table.report(tmp_path / "report").read_text()
    refused = counting(upto=2, env={"SOME": "${NOT_SET_ANYWHERE}"})
    table = Benchmark([refused], path=tmp_path / "b").run(cluster)
    assert (table.rows[0].outcome, table.rows[0].world_size) == (Outcome.FAILED, 1)
    assert "NOT_SET_ANYWHERE" in table.rows[0].reason


@pytest.mark.slow
def test_a_job_of_another_package_is_prepared_sent_run_and_reported(cluster: Cluster) -> None:
    run = cluster.submit(counting(upto=3, say="tick", env={"SOME": "value"}))
    result = run.wait(300, progress=False)
    result.raise_for_status()
    assert result.state is RunState.SUCCEEDED
    assert result.world_size == 2
    for rank in (0, 1):
        log = run.paths.rank_log(0, rank, "stdout").read_text()
        assert log.splitlines() == ["tick 0", "tick 1", "tick 2"]
    assert (run.paths.root / "files" / "last.txt").read_text() == "2"
    assert result.technique == "count"
    assert '"data": "tick-3"' in run.paths.origin.read_text()
    spec = RunSpec.load(run.paths.spec)
    assert spec.job == counting(upto=3, say="tick", env={"SOME": "${SOME}"})
    view = RunView(run.paths.root)
    view.refresh()
    assert view.state is RunState.SUCCEEDED
    assert run.id in as_text(run)


@pytest.mark.slow
def test_the_package_of_the_guide_adds_a_kind_of_job(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"'time'.*times"):
        registry.job_from_dict({"kind": "greeting", "time": 2})
    with pytest.raises(ConfigError, match="words is empty"):
        cluster.submit(registry.job_from_dict({"kind": "greeting", "words": ""}))
    run = cluster.submit(registry.job_from_dict({"kind": "greeting", "words": "hi", "times": 2}))
    result = run.wait(300, progress=False)
    result.raise_for_status()
    assert run.logs(rank=1).splitlines() == ["hi from rank 1"] * 2
    steps = [event for event in run.events() if event.kind == "step"]
    assert [(event.rank, event.data["greetings"]) for event in steps] == [(0, 1), (0, 2)]


@pytest.mark.slow
def test_a_job_of_another_package_stops_when_asked(cluster: Cluster) -> None:
    run = cluster.submit(counting(upto=10_000))
    until(lambda: "n 3" in "\n".join(RunView(run.paths.root).log(1)))
    assert run.state is RunState.RUNNING
    run.stop()
    result = run.wait(300, progress=False)
    assert result.state is RunState.STOPPED
    assert says(result.message, ": the ranks ended by themselves within {} s")


@pytest.mark.slow
def test_the_failure_of_a_job_of_another_package_is_told_in_its_users_files(
    cluster: Cluster,
) -> None:
    run = cluster.submit(counting(env={"COUNT_WORDS": "unused"}, say=" ", upto=2))
    result = run.wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert result.error.kind == "IndexError"
    assert 'File "counting", line' in result.error.traceback


@pytest.mark.slow
def test_a_refusal_of_a_job_of_another_package_leaves_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counting()
    monkeypatch.setattr(RunSpec, "world_size", 9)
    with pytest.raises(ConfigError, match="at most 8 ranks"):
        cluster.submit(job, path=tmp_path / "run")
    assert not (tmp_path / "run").exists()
