"""Ending: stop, grace, sweep, lease, and what a killed agent leaves. Never a stranger's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hanging import hanging
from tests.support.poll import until
from tests.support.sentences import sentence
from workbench.agent.clients.client import Client
from workbench.agent.main import end_leftovers
from workbench.agent.supervisor import Agent
from workbench.base.messages.rpc import Refused
from workbench.base.process import Process, look_up, process_table

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, "
    "signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)
# Says the pid of a child that holds stdout and hears no TERM.
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], **OPTIONS)
os.write(1, b"child %d\\n" % child.pid)
time.sleep(60)
"""


def parent(options: str = "{}") -> str:
    return PARENT.replace("OPTIONS", options)


def child_of(agent, run: str) -> Process:
    """The child of rank 0, once it is up and deaf."""
    text = agent.until_printed(
        run, "up\n"
    ).decode()  # the line's end is a write of its own, which may meet no reader
    process = look_up(int(text.split("child ")[1].split()[0]))
    assert process is not None
    return process


def rank_of(agent, run: str, rank: int = 0) -> Process:
    process = look_up(agent.poll(run)["ranks"][rank]["pid"])
    assert process is not None
    return process


def test_stop_is_polite_quick_and_can_be_said_twice(agent):
    agent.start(
        "r",
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\n" + SLEEP,
        ranks=2,
    )
    agent.until(
        "r",
        lambda a: all(
            (agent.root / f"runs/r/attempt-0/rank-{r}.stdout.log").stat().st_size for r in (0, 1)
        ),
    )
    agent.ask("stop", run="r", grace_s=3600)
    agent.ask("stop", run="r", grace_s=3600)
    ranks = agent.until_exited("r")["ranks"]
    assert [(r["exit_code"], r["stopped"], r["forced"], r["error"]) for r in ranks] == [
        (7, True, False, None)
    ] * 2
    agent.ask("stop", run="r", grace_s=1)
    assert agent.ask("stop", run="never-heard-of", grace_s=1)["known"] is False


def test_a_rank_that_ignores_term_is_killed_after_the_grace(agent):
    agent.start("r", DEAF)
    agent.until_printed("r", "up")
    began = time.monotonic()
    agent.ask("stop", run="r", grace_s=1)
    (rank,) = agent.until_exited("r")["ranks"]
    assert time.monotonic() - began > 0.9
    assert (rank["exit_code"], rank["stopped"], rank["forced"]) == (-9, True, True)


def test_a_stopped_process_hears_the_stop(agent):
    agent.start("r", "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\n" + SLEEP)
    agent.until_printed("r", "up")
    os.kill(rank_of(agent, "r").pid, signal.SIGSTOP)
    agent.ask("stop", run="r", grace_s=300)
    (rank,) = agent.until_exited("r")["ranks"]
    assert (rank["exit_code"], rank["forced"]) == (7, False)


def test_stop_before_start_starts_nothing(agent):
    agent.ask("prepare", run="r", request=agent.request("r", "print('no')"))
    agent.ask("stop", run="r", grace_s=1)
    (rank,) = agent.poll("r")["ranks"]
    assert (rank["phase"], rank["stopped"], rank["exit_code"]) == ("exited", True, None)
    with pytest.raises(Refused, match="stopped"):
        agent.ask("start", run="r")


@pytest.mark.parametrize("options", ["{}", "{'start_new_session': True}"])
def test_a_killed_rank_is_noticed_at_once_and_the_child_that_holds_its_output_goes_too(
    agent, wait_gone, options
):
    agent.start("r", parent(f"dict({options})"))
    child = child_of(agent, "r")
    os.kill(rank_of(agent, "r").pid, signal.SIGKILL)
    answer = agent.until("r", lambda a: a["ranks"][0]["phase"] == "exited")
    assert answer["ranks"][0]["error"]["message"] == "killed by SIGKILL"
    agent.until_exited("r")
    wait_gone(child, timeout_s=0)


def test_a_child_without_marks_is_swept_by_its_session_while_other_ranks_go_on(agent, wait_gone):
    code = f"""
import os, subprocess, sys, time
if os.environ["RANK"] == "0":
    child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], env={{}})
    os.write(1, b"child %d\\n" % child.pid)  # in one piece: print writes its arguments one by one
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
    agent.start("r", code, ranks=2)
    child = look_up(int(agent.until_printed("r", "child").split()[1]))
    wait_gone(child, timeout_s=3)
    answer = agent.poll("r")
    assert [rank["phase"] for rank in answer["ranks"]] == ["exited", "running"]


def test_a_daemon_that_left_session_parent_and_group_is_swept_by_its_marks(agent, wait_gone):
    daemon = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n{DEAF}"
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {daemon!r}])\n"
        f"{DEAF.replace('up', 'rank')}"
    )
    agent.start("r", code)
    agent.until_printed("r", "up")
    answer = agent.until("r", lambda a: a["live_processes"] == 2)
    assert answer["ranks"][0]["phase"] == "running"
    agent.ask("stop", run="r", grace_s=0.3)
    agent.until_exited("r")


def test_end_of_one_rank_leaves_the_others(agent):
    agent.start("r", "import os, time; time.sleep(60 * (os.environ['RANK'] == '1'))", ranks=2)
    answer = agent.until("r", lambda a: a["ranks"][0]["phase"] == "exited")
    time.sleep(1)  # long enough for the agent to end what it should leave
    answer = agent.poll("r")
    assert answer["ranks"][1]["phase"] == "running" and answer["live_processes"] == 1


def test_of_two_runs_only_the_one_that_was_meant_is_stopped(agent, wait_gone):
    agent.start("a", parent())
    agent.start("b", parent())
    agent.until("b", lambda a: a["live_processes"] == 2)
    agent.until("a", lambda a: a["live_processes"] == 2)
    agent.ask("stop", run="a", grace_s=0.3)
    agent.until_exited("a")
    answer = agent.poll("b")
    assert answer["live_processes"] == 2 and answer["ranks"][0]["phase"] == "running"


def test_a_decoy_with_the_same_command_line_survives(agent):
    argv = [sys.executable, "-c", SLEEP]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as decoy:
        decoy.stdout.readline()
        agent.start("r", SLEEP)
        agent.until_printed("r", "up")
        agent.ask("stop", run="r", grace_s=0)
        agent.until_exited("r")
        agent.ask("shutdown")
        agent.serve()
        assert decoy.poll() is None
        decoy.kill()


def test_shutdown_ends_everything_before_it_answers(agent, wait_gone):
    agent.start("r", parent())
    child = child_of(agent, "r")
    rank, process = rank_of(agent, "r"), look_up(agent.pid)
    assert agent.ask("shutdown", grace_s=0.3)["live_processes"] == 0
    wait_gone(rank, child, timeout_s=0)
    wait_gone(process, timeout_s=1)


def test_sigterm_is_a_shutdown(agent, wait_gone):
    agent.start("r", SLEEP)
    agent.until_printed("r", "up")
    rank, process = rank_of(agent, "r"), look_up(agent.pid)
    os.kill(agent.pid, signal.SIGTERM)
    wait_gone(rank, process, timeout_s=3)
    assert not (agent.root / "agent.sock").exists()


def test_when_the_agent_is_killed_its_ranks_die_and_the_next_one_cleans_up(agent, wait_gone):
    agent.start("r", parent("dict(start_new_session=True)"))
    child = child_of(agent, "r")
    rank, killed = rank_of(agent, "r"), agent.pid
    os.kill(agent.pid, signal.SIGKILL)
    wait_gone(rank, timeout_s=30)
    assert not look_up(child.pid).zombie and (agent.root / "agent.sock").exists()
    assert agent.serve() != killed
    wait_gone(child, timeout_s=0)
    with pytest.raises(Refused, match=sentence("run {} is not prepared on")):
        agent.poll("r")


def test_what_a_dead_agent_left_is_ended(agent, wait_gone):
    agent.start("r", parent("dict(start_new_session=True)"))
    child = child_of(agent, "r")
    os.kill(agent.pid, signal.SIGKILL)
    assert end_leftovers(agent.root.resolve()) >= 1
    wait_gone(child, timeout_s=0)


@pytest.mark.slow
def test_an_agent_that_hangs_is_replaced(agent, wait_gone):
    agent.start("r", SLEEP)
    agent.until_printed("r", "up")
    rank, hung = rank_of(agent, "r"), look_up(agent.pid)
    with hanging(hung.pid):
        assert agent.serve(timeout_s=60) != hung.pid
    wait_gone(rank, hung, timeout_s=0)
    assert "did not answer" in agent.ask("hello")["replaced"]


def test_an_agent_that_is_stopped_is_continued(agent):
    agent.start("r", SLEEP)
    agent.until_printed("r", "up")
    stopped = look_up(agent.pid)
    stopped.send(signal.SIGSTOP)
    assert agent.serve(timeout_s=60) == stopped.pid
    assert agent.poll("r")["ranks"][0]["phase"] == "running"
    assert agent.ask("hello")["replaced"] == ""


@pytest.mark.slow
def test_the_lease_is_the_keepers_to_renew(make_agent, wait_gone):
    agent = make_agent()
    agent.serve("--lease-s", "6")  # a busy machine delays a renewal by some seconds
    agent.start("r", DEAF)
    agent.until_printed("r", "up")
    for _ in range(8):
        time.sleep(1)
        agent.ask("ping")
    rank, process = rank_of(agent, "r"), look_up(agent.pid)
    began = time.monotonic()
    other = Client(agent.root)
    while rank.is_alive():  # somebody else's words are no sign of the keeper
        assert time.monotonic() < began + 300
        try:
            other.ask("ping")
        except OSError:
            break
        time.sleep(0.1)
    other.close()
    assert time.monotonic() - began > 5.8
    wait_gone(rank, process, timeout_s=30)
    assert not (agent.root / "agent.sock").exists()


def test_an_agent_that_no_keeper_ever_greeted_ends_too(make_agent, wait_gone):
    agent = make_agent()
    process = look_up(agent.serve_only("--lease-s", "0.5"))
    wait_gone(process, timeout_s=30)


@pytest.mark.long
def test_ranks_can_be_ended_a_hundred_times_without_a_trace(agent):
    open_before = len(list(Path(f"/proc/{agent.pid}/fd").iterdir()))
    code = "import os\nif os.fork(): os.kill(os.getpid(), 9)\nimport time; time.sleep(60)"
    for number in range(20):
        agent.start(f"r{number}", code, ranks=5)
    for number in range(20):
        ranks = agent.until(
            f"r{number}", lambda a: not a["live_processes"] and all(r["error"] for r in a["ranks"])
        )["ranks"]
        assert [r["exit_code"] for r in ranks] == [-9] * 5
    me = agent.pid
    # A look at the memory of the ranks may have been under way.
    until(lambda: not [p for p in process_table().values() if p.parent == me])
    until(lambda: len(list(Path(f"/proc/{me}/fd").iterdir())) <= open_before)


def test_an_agent_that_slept_for_longer_than_its_lease_gives_the_keeper_time(tmp_path, monkeypatch):
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    agent = Agent(tmp_path, 12.0)
    monkeypatch.setattr(agent, "_reap", lambda: None)  # children here are pytest's
    agent.tick()
    now_s += 14.0  # the machine sleeps
    agent.tick()
    assert not agent.finished
    now_s += 3.0
    agent.renew()
    now_s += 5.0  # more than the time that it gave; the keeper has spoken since
    agent.tick()
    assert not agent.finished
    now_s += 14.0
    agent.tick()
    now_s += 4.5  # a third of the lease is over
    agent.tick()
    assert agent.finished


GUARDED = """
import os, subprocess, sys
from pathlib import Path
from workbench.agent.main import end_leftovers
from workbench.agent.supervisor import Agent
from workbench.base.process import become_subreaper, look_up
become_subreaper()
start = (
    "import subprocess; null = subprocess.DEVNULL; "
    "print(subprocess.Popen(['sleep', '60'], env={}, stdout=null, start_new_session=True).pid)"
)
pid = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE).stdout)
assert look_up(pid).parent == os.getpid()
agent = os.fork()
if not agent:
    end_leftovers(Path(sys.argv[2]))
    os._exit(0)
os.waitpid(agent, 0)
print(look_up(pid).zombie)
"""


def test_a_daemon_without_marks_is_ended_where_a_guardian_has_adopted_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", GUARDED, "workbench.pods.bootstrap.guardian", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr
