"""What is predicted for a run stands beside its other files, and the doctor judges it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from workbench.planner.foresee import Foresight, foresee, foretell
from workbench.pods.doctor import Diagnosis, HostReport
from workbench.pods.pod import PodSpec
from workbench.pods.verdicts import MEMORY_OF_JOB, Finding, Verdict
from workbench.runs.paths import RunPaths
from workbench.runs.result import RunResult
from workbench.runs.state import RunState
from workbench.spec.job import FineTune, Script

JOB = FineTune(max_source_length=16, max_target_length=16)
HOSTS = tuple(
    HostReport(pod=f"pod-{n}", address=f"127.0.0.{n}", findings=(Finding(check="ssh", verdict=Verdict.GOOD, found=""),))
    for n in (2, 3)
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
def test_a_run_gets_its_prediction_later_and_the_next_alike_at_once(tmp_path: Path) -> None:
    first, second = RunPaths(tmp_path / "a"), RunPaths(tmp_path / "b")
    for paths in (first, second):
        paths.root.mkdir()
    foresight = Foresight(PodSpec(memory_gib=0.5), local=True)
    foresight.begin(JOB, 2, first.prediction)
    deadline = time.monotonic() + 300
    while not first.prediction.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    foresight.begin(JOB, 2, second.prediction)
    foresight.close()
    said = json.loads(second.prediction.read_text())
    assert said == json.loads(first.prediction.read_text())
    assert "will not fit" in said["warning"] and "0.50 GiB" in said["warning"]
    result = RunResult(path=first.root, state=RunState.SUCCEEDED)
    assert result.predicted_memory_gib == pytest.approx(sum(said["parts_gib"].values()))
    assert "predicted for a pod" in str(result) and "predicted for a pod" in result._repr_html_()


def test_closing_ends_what_is_still_tracing(tmp_path: Path) -> None:
    job = FineTune(max_source_length=24, max_target_length=16)
    child = foresee(job, pods=1, spec=PodSpec(), local=True, file=tmp_path / "a.json")
    assert child is not None
    foresight = Foresight(PodSpec(), local=True)
    foresight._children.append(child)
    foresight.close()
    foresight.close()
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "a.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("memory_gib", "verdict"), [(0.5, Verdict.BAD), (64.0, Verdict.GOOD)])
def test_the_doctor_says_whether_a_job_fits_the_pods_it_uses(memory_gib: float, verdict: Verdict) -> None:
    plain = Diagnosis(hosts=HOSTS, hosts_s=0.1)
    found = foretell(plain, JOB, pods=1, spec=PodSpec(memory_gib=memory_gib), local=True)
    last = found.hosts[0].findings[-1]
    assert (last.check, last.verdict) == (MEMORY_OF_JOB, verdict)
    assert found.hosts[1] == HOSTS[1]  # the job does not use it
    assert found.ok is (verdict is Verdict.GOOD)
    assert MEMORY_OF_JOB in str(found)


def test_of_a_model_whose_shape_is_not_known_nothing_is_said(tmp_path: Path) -> None:
    job = FineTune(model="me/mine")
    foresee(job, pods=1, spec=PodSpec(), local=True, file=tmp_path / "prediction.json")
    foresee(Script(path="x.py"), pods=1, spec=PodSpec(), local=True, file=tmp_path / "prediction.json")
    assert list(tmp_path.iterdir()) == []
    found = foretell(Diagnosis(hosts=HOSTS, hosts_s=0.1), job, pods=2, spec=PodSpec(), local=True)
    assert found.hosts[0].findings[-1].verdict is Verdict.UNKNOWN
    assert RunResult(path=tmp_path, state=RunState.SUCCEEDED).predicted_memory_gib is None
