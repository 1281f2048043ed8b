"""`CMLProject`: jobs and applications over HTTP, against a server of documented fields alone."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.cmlserver import KEY, PROJECT, CMLServer
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import BackendError, ConfigError, PodTimeout
from workbench.client.run import Run
from workbench.pods.cml.project import CMLProject


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CMLServer]:
    monkeypatch.setattr("workbench.pods.cml.project._LOOK_S", 0.1)
    with CMLServer(tmp_path) as made:
        monkeypatch.setenv("CDSW_API_URL", f"{made.url}/api/v1")
        monkeypatch.setenv("CDSW_PROJECT_ID", PROJECT)
        monkeypatch.setenv("CDSW_APIV2_KEY", KEY)
        yield made


@pytest.fixture
def project(server: CMLServer, tmp_path: Path) -> CMLProject:
    return CMLProject(
        runtime="registry.example.org/deepspeed-workbench/cml-runtime:0.1.1", folder=tmp_path
    )


def spec(folder: Path, line: str) -> Path:
    (folder / "train.py").write_text(f"{line}\n")
    cluster = {"backend": {"kind": "local"}, "pods": {"cpus": 1}, "count": 1, "warm": False}
    asked = {"cluster": cluster, "job": {"kind": "script", "path": str(folder / "train.py")}}
    (folder / "SPEC.json").write_text(json.dumps(asked))
    return folder / "SPEC.json"


@pytest.mark.long
def test_a_job_carries_out_a_specification_without_a_notebook(
    project: CMLProject, server: CMLServer, tmp_path: Path
) -> None:
    job = project.run_job(
        spec(tmp_path, "print('trained')"),
        name="nightly",
        cpu=4,
        memory_gib=16,
        nvidia_gpu=1,
        timeout_s=3600,
    )
    assert job.wait(300) == "ENGINE_SUCCEEDED"
    assert "trained" in Run.load(job.path).logs()
    (_, path, asked), (_, started, _) = server.asked[:2]
    assert (path, started) == (
        f"/api/v2/projects/{PROJECT}/jobs",
        f"/api/v2/projects/{PROJECT}/jobs/{job.id}/runs",
    )
    wanted = {
        "cpu": 4,
        "memory": 16,
        "nvidia_gpu": 1,
        "runtime_identifier": project.runtime,
        "timeout": "3600",
    }
    assert wanted.items() <= asked.items()
    job.delete()
    assert server.asked[-1][:2] == ("DELETE", f"/api/v2/projects/{PROJECT}/jobs/{job.id}")
    assert KEY not in json.dumps([body for *_, body in server.asked]) + repr(project) + repr(job)
    assert all(KEY not in path.read_text() for path in (tmp_path / ".workbench").iterdir())

    failing = project.run_job(spec(tmp_path, "raise SystemExit(3)"), name="failing")
    assert failing.wait(300) == "ENGINE_FAILED"


@pytest.mark.slow  # the server starts a process for it
def test_tensorboard_outlives_the_session(
    project: CMLProject, server: CMLServer, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    application = project.tensorboard(tmp_path / "runs", name="board")
    assert application.url == f"{server.url.replace('//', f'//board-{PROJECT}.')}"
    assert application.wait() == "APPLICATION_RUNNING"
    number, port = application.id, server.ports[application.id]
    del application, project

    def page() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=300) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    until(lambda: "TensorBoard" in page(), 60)
    later = CMLProject(runtime="x", folder=tmp_path)  # another session
    later._ask("DELETE", f"/applications/{number}")
    assert server.engines[number].poll() is not None
    asked = server.asked[0][2]
    assert (asked["subdomain"], asked["bypass_authentication"]) == (f"board-{PROJECT}", False)


@pytest.mark.slow  # the server starts a process for it
def test_a_job_is_stopped_and_a_wait_ends(project: CMLProject, tmp_path: Path) -> None:
    job = project.run_job(
        spec(tmp_path, "import time; time.sleep(600)"), name="long", out=tmp_path / "out"
    )
    with pytest.raises(
        PodTimeout, match=sentence("is {} after {} s", "job long", "ENGINE_RUNNING", 0)
    ):
        job.wait(0.2)
    job.stop()
    assert job.wait(300) == "ENGINE_STOPPED"


def test_refusals_are_the_platforms_words(
    project: CMLProject, server: CMLServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    server.refusal = (400, "runtime identifier not found in the catalog")
    with pytest.raises(
        BackendError,
        match=sentence(
            "Cloudera ML refused {} {} ({})",
            "POST /applications",
            400,
            "runtime identifier not found",
        ),
    ):
        project.tensorboard(tmp_path / "runs")
    monkeypatch.setenv("CDSW_APIV2_KEY", "another")
    with pytest.raises(BackendError, match=r"\(401\): the API key is not valid"):
        project.tensorboard(tmp_path / "runs")
    monkeypatch.delenv("CDSW_APIV2_KEY")
    with pytest.raises(
        ConfigError, match=sentence("outside a session make a key (API Keys", "CDSW_APIV2_KEY")
    ):
        project.tensorboard(tmp_path / "runs")
    monkeypatch.setenv("CDSW_APIV2_KEY", KEY)
    monkeypatch.setenv("CDSW_API_URL", "http://127.0.0.1:1/api/v1")
    with pytest.raises(
        BackendError, match=sentence("Cloudera ML at {} does not answer", "http://127.0.0.1:1")
    ):
        project.tensorboard(tmp_path / "runs")


def test_a_platform_that_does_not_answer_in_time_refuses_nothing(
    project: CMLProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("CDSW_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api/v1")
        hurried = CMLProject(runtime=project.runtime, folder=tmp_path, request_timeout_s=0.25)
        with pytest.raises(BackendError) as late:
            hurried.tensorboard(tmp_path / "runs")
    assert says(str(late.value), "Cloudera ML at {} did", "0.25 s")
    assert "request_timeout_s=1)" in str(late.value)
    assert "refused" not in str(late.value)


def test_what_cannot_be_is_refused_before_anything_is_asked(
    project: CMLProject, server: CMLServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half.json").write_text('{"cluster": {}}')
    for path in ("none.json", "half.json"):
        with pytest.raises(ConfigError, match=sentence("write a SPEC.json as for `workbench run`")):
            project.run_job(tmp_path / path, name="a")
    with pytest.raises(
        ConfigError,
        match=sentence("the run sees only the project's folder", "specification /etc/hosts"),
    ):
        project.run_job("/etc/hosts", name="a")
    with pytest.raises(ConfigError, match=sentence("is there already; name another with out=")):
        project.run_job(spec(tmp_path, ""), name="a", out=tmp_path)
    with pytest.raises(
        ConfigError,
        match=sentence("is not there; name a run directory, or a folder of several", "runs"),
    ):
        project.tensorboard(tmp_path / "runs")
    with pytest.raises(ConfigError, match=sentence("a letter or digit first and last", "a/b")):
        project.run_job(spec(tmp_path, ""), name="a/b")
    with pytest.raises(
        ConfigError,
        match=sentence("as in 'https://ml-1.example.org", "ml.example.org"),
    ):
        CMLProject(runtime="x", url="ml.example.org")
    for variable, words in (
        ("CDSW_PROJECT_ID", sentence("CMLProject needs the project's id outside a session")),
        ("CDSW_API_URL", sentence("CMLProject needs the workbench's address outside a session")),
    ):
        monkeypatch.delenv(variable)
        with pytest.raises(ConfigError, match=words):
            CMLProject(
                runtime="x", folder=tmp_path, **({"project": "p"} if "URL" in variable else {})
            ).tensorboard(tmp_path)
    assert server.asked == []
