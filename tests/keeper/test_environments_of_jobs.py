"""The environment of a job is made on every pod before ranks start: no process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.runloop import RUN, SimLink, Simulation
from tests.support.scripts import script_job
from tests.support.sentences import says, sentence
from workbench.base.errors import PodError, PodTimeout, RemoteError
from workbench.base.files import read_json, write_json
from workbench.jobs.job import NeededPackage
from workbench.jobs.requirements.requirements import Requirements
from workbench.jobs.script import Script
from workbench.keeper.link import environments
from workbench.keeper.run import packages as module
from workbench.keeper.run.packages import Packages, PackagesError
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.journal import Journal

BUSY = {"state": "busy", "line": "Collecting trl"}
MADE = {"state": "made", "line": "Successfully installed trl"}
THERE = {"state": "made", "line": ""}
Answer = Mapping[str, object]


class Needing(Script):
    """A script that needs packages on the pods, as a trainer does."""

    @property
    def needed(self) -> Sequence[NeededPackage]:
        return [NeededPackage(name="trl", least="1.16", reason="method 'dpo'")]


class Link(SimLink):
    """A line to an agent that makes environments, with the answers of a script."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.answers: list[Answer] = [THERE]
        """The last answer is that of all later requests."""
        self.requests: list[Mapping[str, Any]] = []
        self.at_request: Callable[[], object] = lambda: None
        self.prints = "{}"
        self.log: str | None = "Collecting trl\n"
        self.argv: Sequence[str] = ()

    def _answer(self, op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        assert op == "environment"
        self.requests.append(fields)
        self.at_request()
        answer = self.answers[0]
        if len(self.answers) > 1:
            self.answers.pop(0)
        return dict(answer)

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        self.argv = argv
        return self.prints

    def get(self, remote: str, local: Path) -> str:
        assert remote == f"/pods/{self.pod.name}/runs/{RUN}/packages.log"
        if self.log is None:
            raise RemoteError("no such file", host=self.pod.address)
        local.write_text(self.log)
        return ""


class Made:
    """A run of two pods whose job has packages."""

    def __init__(self, folder: Path, needs: Requirements | None, job: Script) -> None:
        sim = Simulation(folder, job)
        if needs is not None:
            write_json(folder / RUN / "inputs" / "requirements.json", needs.facts())
        self.links = [Link(pod) for pod in sim.pods]
        self.context = sim.context().on(self.links)
        self.unwanted = False
        self.journal = Journal(self.context.paths)

    def install(self) -> bool:
        packages = Packages(self.context, self.journal, unwanted=lambda: self.unwanted)
        return packages.install()

    def fails(self) -> PackagesError:
        with pytest.raises(PackagesError) as failed:
            self.install()
        return failed.value

    @property
    def hint(self) -> str:
        return str(read_json(self.context.paths.state)["hint"])


TRL = Requirements(source="the header of train.py", lines=["trl==1.16.0"], notes=["one is ignored"])


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path, TRL, script_job(path="/home/me/train.py", env={"PIP_INDEX_URL": "here"}))


@pytest.fixture(autouse=True)
def hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that each pause moves by a minute."""
    clock = SimpleNamespace(now=100.0)

    def sleep(_s: float) -> None:
        clock.now += 60.0

    monkeypatch.setattr(
        environments, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
    )
    return clock


def test_a_job_without_packages_asks_no_pod(tmp_path: Path) -> None:
    made = Made(tmp_path, None, script_job(path="/home/me/train.py"))
    assert made.install()
    assert not any(link.requests for link in made.links)


def test_packages_that_are_the_pod_s_own_are_not_installed(tmp_path: Path) -> None:
    needs = Requirements(source="a header", requires_python=">=3")
    made = Made(tmp_path, needs, script_job(path="/home/me/train.py"))
    assert made.install()
    assert not any(link.requests for link in made.links)


def test_a_pod_with_another_python_is_refused(tmp_path: Path) -> None:
    needs = Requirements(source="a header", requires_python=">=3.99")
    made = Made(tmp_path, needs, script_job(path="/home/me/train.py"))
    made.links[1].pod = replace(made.links[1].pod, versions={"python": "3.11.2"})
    fault = made.fails().fault
    assert (fault.kind, fault.pod, fault.host) == ("packages", "pod-1", "10.0.0.1")


def test_each_pod_gets_the_packages_and_the_variables(made: Made) -> None:
    seen: list[Mapping[str, Any]] = []
    made.links[0].at_request = lambda: seen.append(read_json(made.context.paths.state))
    assert made.install()
    for link in made.links:
        (request,) = link.requests
        assert (request["run"], request["stop"]) == (RUN, False)
        assert request["folder"].startswith("/store/environment-")
        assert request["request"] == {
            "lines": ["trl==1.16.0"],
            "constraints": [],
            "isolated": False,
            "env": {"PIP_INDEX_URL": "here"},
        }
    assert seen[0]["state"] == "starting"
    assert "the header of train.py" in seen[0]["message"]
    assert "one is ignored" in seen[0]["message"]


def test_the_output_of_an_installation_is_shown_and_kept_masked(made: Made) -> None:
    made.context.redact.learn({"HF_TOKEN": "hf_secret_word"})
    hints: list[str] = []
    link = made.links[1]
    link.answers = [{"state": "busy", "line": "Collecting hf_secret_word"}, BUSY, MADE]
    link.at_request = lambda: hints.append(made.hint)
    link.log = "token hf_secret_word\n"
    assert made.install()
    assert hints[1].startswith("pod-1: Collecting ") and "hf_secret_word" not in hints[1]
    assert hints[2] == "pod-1: Collecting trl"
    assert made.hint == ""
    assert len(link.requests) == 3
    log = made.context.paths.packages_log("pod-1").read_text()
    assert log.startswith("token ") and "hf_secret_word" not in log


def test_an_environment_that_was_there_has_no_log(made: Made) -> None:
    assert made.install()
    assert not made.context.paths.packages_log("pod-0").exists()


def test_a_pod_without_a_line_shows_none(made: Made) -> None:
    hints: list[str] = []
    link = made.links[0]
    link.answers = [BUSY, {"state": "busy", "line": ""}, MADE]
    link.at_request = lambda: hints.append(made.hint)
    assert made.install()
    assert hints[1:] == ["pod-0: Collecting trl", ""]


def test_a_failed_installation_names_the_packages_the_cause_and_the_log(made: Made) -> None:
    answer = {"state": "failed", "why": "no version 1.16.0", "tail": "ERROR: none found"}
    made.links[1].answers = [answer]
    fault = made.fails().fault
    assert (fault.kind, fault.pod, fault.host) == ("packages", "pod-1", "10.0.0.1")
    assert says(
        fault.message,
        "({}) could not be installed",
        "trl==1.16.0",
        "no version 1.16.0",
    )
    log = made.context.paths.packages_log("pod-1")
    assert says(fault.message, "; all lines are in", log)
    assert fault.traceback == "ERROR: none found"
    assert not says(fault.message, "the agent of the pod named no reason")
    assert made.hint == ""


def test_a_failed_installation_without_a_cause_or_a_log_says_so(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    made.links[1].answers = [{"state": "failed"}]
    made.links[1].log = None
    fault = made.fails().fault
    assert says(fault.message, "the agent of the pod named no reason")
    assert not says(fault.message, "; all lines are in")
    assert fault.traceback == ""
    assert says(caplog.text, "the log of pip on", "pod-1")


def test_a_log_that_cannot_be_masked_is_not_kept(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "mask_file", full)
    made.links[1].answers = [MADE]
    assert made.install()
    assert not made.context.paths.packages_log("pod-1").exists()


def test_the_other_pods_end_when_one_fails(made: Made) -> None:
    """The second pod installs for longer than the first needs to fail."""
    made.links[0].answers = [BUSY, {"state": "failed", "why": "no version"}]
    made.links[1].answers = [BUSY]
    other = made.links[1]

    def end() -> None:
        if other.requests[-1]["stop"]:
            other.answers = [{"state": "stopped"}]

    other.at_request = end
    assert made.fails().fault.pod == "pod-0"
    assert other.requests[-1]["stop"]


def test_an_installation_ends_after_an_hour(made: Made, hand: Any) -> None:
    began = hand.now
    made.links[0].answers = [BUSY]
    fault = made.fails().fault
    assert says(fault.message, "the packages were not installed in {} s", 3600)
    assert 3600 < hand.now - began < 3900
    assert [request["stop"] for request in made.links[0].requests[:3]] == [False] * 3
    assert made.links[0].requests[-1]["stop"]


def test_a_run_that_is_not_wanted_gives_pip_some_time_to_end(
    made: Made, monkeypatch: pytest.MonkeyPatch, hand: Any
) -> None:
    pauses: list[float] = []

    def sleep(_s: float) -> None:
        pauses.append(hand.now)
        hand.now += 10.0

    monkeypatch.setattr(
        environments, "time", SimpleNamespace(monotonic=lambda: hand.now, sleep=sleep)
    )
    link = made.links[0]
    link.answers = [BUSY]

    def unwant() -> None:
        made.unwanted = len(link.requests) >= 2

    link.at_request = unwant
    made.links[1].answers = [THERE]
    assert made.install() is False
    # The request that asks to stop is repeated for thirty seconds.
    assert [request["stop"] for request in link.requests] == [False, False, True, True, True, True]


def test_a_run_that_is_not_wanted_stops_at_once_where_nothing_is_installed(made: Made) -> None:
    made.unwanted = True
    for link in made.links:
        link.answers = [{"state": "stopped"}]
    assert made.install() is False
    assert [len(link.requests) for link in made.links] == [1, 1]


# Packages of the cluster.


EINOPS = PodSpec(pip=["einops"], env={"PIP_NO_INDEX": "1"})


def test_a_cluster_s_packages_are_made_in_the_same_way(made: Made) -> None:
    link = made.links[0]
    link.pod = replace(link.pod, versions={"python": "3.11.2"})
    link.install(PodSpec(), 60.0)
    assert not link.requests
    link.answers = [BUSY, MADE]
    link.install(EINOPS, 600.0)
    request = link.requests[-1]
    assert request["run"] == "" and request["folder"].startswith("/store/packages-")
    assert request["request"] == {"lines": ["einops"], "keep": True, "env": {"PIP_NO_INDEX": "1"}}
    library = request["folder"] + "/lib/python3.11/site-packages"
    assert link.packages_folder(["einops"]) == library


def test_a_cluster_s_packages_that_fail_are_an_error_of_the_pod(made: Made) -> None:
    link = made.links[0]
    tail = "Looking in indexes: https://me:s3cretword@one.org/simple\nERROR: none"
    link.answers = [{"state": "failed", "why": "no version", "tail": tail}]
    with pytest.raises(PodError, match=r"could not install einops on pod-0: no version\n") as error:
        link.install(EINOPS, 60.0)
    assert "ERROR: none" in str(error.value) and "s3cretword" not in str(error.value)


def test_pip_is_ended_after_the_time_of_the_cluster_s_start(made: Made) -> None:
    link = made.links[0]
    link.answers = [BUSY]
    with pytest.raises(PodTimeout, match=sentence("pip did not finish in {} s on", 150, "pod-0")):
        link.install(EINOPS, 150.0)
    assert [request["stop"] for request in link.requests] == [False] * 3 + [True] * 2


# Packages that a job needs beside its own.


def needing(folder: Path, prints: str, **env: str) -> Made:
    made = Made(folder, None, Needing.from_dict({"path": "/home/me/train.py", "env": env}))
    for link in made.links:
        link.prints = prints
    return made


@pytest.mark.parametrize("version", ["1.16", "1.16.0", "1.20.1", "unknown"])
def test_a_pod_with_the_package_is_taken(version: str, tmp_path: Path) -> None:
    made = needing(tmp_path, json.dumps({"trl": version}))
    assert made.install()
    assert made.links[0].argv[0] == "/usr/bin/python3"
    assert made.links[0].argv[-1] == "trl"


@pytest.mark.parametrize(("version", "shown"), [("1.9.0", "1.9.0"), ("", "none")])
def test_a_pod_without_the_package_is_refused(version: str, shown: str, tmp_path: Path) -> None:
    made = needing(tmp_path, json.dumps({"trl": version}))
    made.links[0].prints = json.dumps({"trl": "2.0"})
    fault = made.fails().fault
    assert fault.pod == "pod-1"
    assert says(
        fault.message,
        "Ask for the package by PodSpec(pip=[",
        "method 'dpo'",
        "1.16",
        f"has {shown}",
    )


def test_a_pod_that_prints_other_text_is_left_to_its_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert needing(tmp_path, "Welcome!").install()
    assert says(caplog.text, "did not answer which packages it has", "pod-1")


def test_a_path_of_the_user_s_own_is_not_looked_through(tmp_path: Path) -> None:
    made = needing(tmp_path, "{}", PYTHONPATH="/elsewhere")
    assert made.install()
    assert made.links[0].argv == ()


def test_a_path_of_the_pods_is_not_looked_through_either(tmp_path: Path) -> None:
    made = needing(tmp_path, "{}")
    cluster = made.context.spec.cluster.replace(pods=PodSpec(env={"PYTHONPATH": "/elsewhere"}))
    made.context = replace(made.context, spec=made.context.spec.replace(cluster=cluster))
    assert made.install()


def test_a_failure_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    class Bare(SimLink):
        def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
            return '{"trl": ""}' if "-c" in argv else super().run(argv, timeout_s, again=again)

    sim = Simulation(tmp_path, Needing.from_dict({"path": "/home/me/train.py"}))
    sim.link = Bare  # type: ignore[method-assign, assignment]
    assert sim.runner().run() == "failed"
    result: Any = read_json(sim.paths.result)
    assert (result["error"]["kind"], sim.trained) == ("packages", [])
