"""Kill, end or halt one process at one moment of a run, and judge what the workbench does."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import PurePath

from tests.support.poll import until
from tools.chaos.numbered import END_S, Numbered, submit
from tools.chaos.plan import Trial
from tools.chaos.site import Site, left_of_run
from tools.chaos.tally import Outcome
from tools.chaos.victims import find_victims
from workbench import Cluster, Run
from workbench.base.errors import WorkbenchError
from workbench.base.process import RANK_MARK, Process, marks
from workbench.client.result import RunResult
from workbench.pods.pod import Pod
from workbench.rundir.state import RunState

_HALT_S = 3.0
_FATAL_TO_A_POD = ("worker", "sshd")


def outcome_of(trial: Trial) -> Outcome:
    """Return an empty outcome of a trial."""
    return Outcome(
        kind=trial.kind,
        victim=trial.victim,
        launcher=trial.launcher,
        phase=trial.phase,
        signal=trial.signal,
    )


def kill(site: Site, trial: Trial) -> Outcome:
    """Make one trial on a site's cluster."""
    chance, outcome = random.Random(trial.number), outcome_of(trial)
    cluster = site.cluster()
    pod = chance.choice(list(cluster.pods))
    if trial.phase == "idle":
        hit(trial, cluster, pod, None, outcome)
        if trial.signal != "STOP":
            time.sleep(chance.uniform(0, 1.0))
    began = time.monotonic()
    try:
        numbered = submit(
            cluster,
            site.folder,
            payload_mib=3.0 if trial.phase == "sending" else 0.0,
            launcher=trial.launcher,
        )
    except WorkbenchError as error:
        _judge_refusal(outcome, trial, pod, str(error), time.monotonic() - began)
    else:
        _follow(numbered, trial, cluster, pod, chance, outcome)
    ends_the_pods = (
        trial.victim in (*_FATAL_TO_A_POD, "keeper", "forkserver") and trial.signal != "STOP"
    )
    if ends_the_pods or outcome.not_outlived or outcome.state == "hung":
        outcome.orphans += site.give_up()
    return outcome


def _follow(
    numbered: Numbered,
    trial: Trial,
    cluster: Cluster,
    pod: Pod,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    victim, cancelled = "", False
    began = time.monotonic()
    if trial.phase != "idle":
        numbered.reach(trial.phase, chance)
        victim = hit(trial, cluster, pod, numbered.run, outcome)
        began = time.monotonic()
        cancelled = trial.signal == "STOP" and trial.victim == "rank" and chance.random() < 0.5
        if cancelled:
            numbered.run.cancel()
    result = numbered.end()
    if (
        victim
        and trial.signal != "STOP"
        and result is not None
        and result.state is not RunState.SUCCEEDED
    ):
        outcome.shown_s = _shown_s(numbered.run, began)
    judge(outcome, numbered, result, pod=pod, victim=victim, asked=cancelled)
    outcome.orphans += left_of_run(numbered.run.id)


def _shown_s(run: Run, began: float) -> float:
    """Return the seconds from the fault to the result, by when the result was written."""
    written = run.paths.result if run.paths.result.exists() else run.paths.state
    return max(0.0, written.stat().st_mtime - (time.time() - (time.monotonic() - began)))


def hit(trial: Trial, cluster: Cluster, pod: Pod, run: Run | None, outcome: Outcome) -> str:
    """Signal one process of the kind as soon as there is one; return the rank's number, if any."""
    here = None if trial.victim == "rank" and trial.launcher != "ssh" and run is None else pod
    chosen: list[Process] = []

    def there() -> bool:
        chosen[:] = find_victims(trial.victim, cluster.path, here or pod, run)
        return bool(chosen) or (run is not None and run.state.is_terminal)

    until(there, END_S, every_s=0.01)
    if not chosen:
        outcome.missed = True
        return ""
    process = random.Random(trial.number).choice(chosen)
    rank = PurePath(marks(process.pid).get(RANK_MARK, "")).name.removeprefix("rank-")
    sent = process.send(getattr(signal, f"SIG{trial.signal}"))
    outcome.missed = outcome.missed or not sent
    if sent and trial.signal == "STOP":
        threading.Timer(_HALT_S, process.send, [signal.SIGCONT]).start()
    return (rank or trial.victim) if sent else ""


def judge(
    outcome: Outcome,
    numbered: Numbered,
    result: RunResult | None,
    *,
    pod: Pod,
    victim: str,
    asked: bool = False,
    outlives: bool | None = None,
) -> None:
    """Fill in what the end of a run is worth: success, cause and lines."""
    if outlives is None:
        outlives = (
            outcome.victim in ("session", "bridge", "warm", "forkserver")
            or outcome.signal == "STOP"
        )
        outlives = (
            outlives or (outcome.phase == "idle" and outcome.victim == "agent")
        ) and not asked
    if result is None:
        outcome.state, outcome.cause, outcome.message = "hung", "missing", numbered.run.message
        outcome.not_outlived = outlives
        return
    outcome.state, outcome.message = str(result.state), result.message[:500]
    succeeded = result.state is RunState.SUCCEEDED
    outcome.false_success = succeeded and not numbered.whole
    outcome.not_outlived = outlives and not succeeded
    if not succeeded and not asked:
        outcome.cause = _cause(outcome, result, pod, victim)
    _count_lines(outcome, numbered, succeeded, pod)


def _cause(outcome: Outcome, result: RunResult, pod: Pod, victim: str) -> str:
    if outcome.victim == "keeper":
        ended = result.state in (RunState.CANCELLED, RunState.LOST) and bool(result.message)
        return "named" if ended else "wrong"
    error = result.error
    if error is None:
        return "missing"
    if outcome.victim == "rank":
        return (
            "named"
            if victim == str(error.rank)
            else "wrong"
            if error.rank is not None
            else "missing"
        )
    if outcome.victim == "launcher":
        return "named" if error.kind == "launcher" or "launcher" in error.message else "wrong"
    if error.pod:
        return "named" if error.pod == pod.name or outcome.kind == "cut" else "wrong"
    return "wrong" if error.rank is not None else "missing"


def _count_lines(outcome: Outcome, numbered: Numbered, succeeded: bool, pod: Pod) -> None:
    for rank in range(numbered.ranks):
        within, short = numbered.faults_in_lines(rank)
        dead = outcome.victim in ("agent", *_FATAL_TO_A_POD) and pod.name == f"pod-{rank}"
        if not succeeded and (dead or outcome.victim == "keeper"):
            outcome.left_on_the_dead += short
        else:
            outcome.lost_lines += short
        outcome.lost_lines += within


def _judge_refusal(outcome: Outcome, trial: Trial, pod: Pod, message: str, took_s: float) -> None:
    """Judge a submit that was refused, which is right where the pod or the keeper is gone."""
    outcome.state, outcome.message, outcome.shown_s = "refused", message[:500], took_s
    outcome.not_outlived = (
        trial.victim not in (*_FATAL_TO_A_POD, "keeper") or trial.signal == "STOP"
    )
    names = ("clos", "keeper", "lost") if trial.victim == "keeper" else (pod.name,)
    outcome.cause = "named" if any(name in message for name in names) else "missing"


def cut(site: Site, trial: Trial) -> Outcome:
    """Cut the lines to the pods three times in one run, which is to outlive it with every line."""
    chance, outcome = random.Random(trial.number), outcome_of(trial)
    cluster = site.cluster()
    sending = trial.phase == "sending"
    numbered = submit(cluster, site.folder, lines=120, payload_mib=3.0 if sending else 0.0)
    pod = cluster.pods[0]
    for number in range(3):
        numbered.reach("sending" if sending and not number else "running", chance)
        pod = chance.choice(list(cluster.pods))
        hit(trial, cluster, pod, numbered.run, outcome)
    result = numbered.end()
    judge(outcome, numbered, result, pod=pod, victim=trial.victim, outlives=True)
    outcome.orphans += left_of_run(numbered.run.id)
    if outcome.not_outlived:
        outcome.orphans += site.give_up()
    return outcome
