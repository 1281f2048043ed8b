"""The program that pdsh, mpirun and a pasted line start: it finds its pod and runs its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.sentences import says
from workbench.agent.clients.client import place_from
from workbench.agent.ranks.job import shares
from workbench.base.process import look_up

CODE = """
import os, sys, time
names = ("RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT "
         "CUDA_VISIBLE_DEVICES WORKBENCH_POD LEAK").split()
print("|".join(os.environ.get(n, "-") for n in names)); print("warn", file=sys.stderr); END
"""
DEEPSPEED = {
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.9",
    "MASTER_PORT": "12345",
}
CLEAN = {
    k: v
    for k, v in os.environ.items()
    if not k.startswith(("OMPI_", "MASTER_")) and k not in ("RANK", "LOCAL_RANK")
}


@pytest.fixture
def pods(make_agent):
    """Two pods of one machine, each with an agent."""
    agents = [make_agent(f"pod-{i}") for i in range(2)]
    for agent in agents:
        agent.serve()
    return agents


def prepare(pods, run: str, end: str) -> None:
    for agent in pods:
        ranks = [{"rank": i, "local_rank": 0, "pod": f"pod-{i}"} for i in range(2)]
        agent.ask(
            "prepare",
            run=run,
            request=agent.request(run, CODE.replace("END", end), ranks=2) | {"ranks": ranks},
        )


def rank(pods, run: str, *flags: str, **env: str) -> subprocess.Popen:
    argv = [
        sys.executable,
        "-m",
        "workbench.agent",
        "rank",
        str(pods[0].root.parent),
        run,
        *flags,
    ]
    return subprocess.Popen(
        argv, env={**CLEAN, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        ([], {**DEEPSPEED, "RANK": "1"}),
        (
            [],
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "2",
            }
            | {k: v for k, v in DEEPSPEED.items() if k.startswith("MASTER")},
        ),
        (
            [
                "--rank=1",
                "--local-rank=0",
                "--world-size=2",
                "--master-addr=127.0.0.9",
                "--master-port=12345",
            ],
            {"RANK": "0"},
        ),
    ],
    ids=["deepspeed", "openmpi", "flags"],
)
def test_it_starts_its_rank_on_its_pod_and_shows_it(pods, flags, env):
    prepare(pods, "r", "")
    started = rank(pods, "r", *flags, **env, CUDA_VISIBLE_DEVICES="3", LEAK="secret")
    out, err = started.communicate(timeout=300)
    assert out == f"1|0|2|127.0.0.9|12345|3|{pods[1].root}|-\n" and err == "warn\n"
    assert started.returncode == 0
    assert pods[0].poll("r")["ranks"][0]["phase"] == "waiting"
    assert pods[1].poll("r")["ranks"][0]["done"]


def test_what_is_quiet_leaves_its_output_on_the_pod(pods):
    """So a launcher of the keeper's, which mixes lines of ranks, holds no secret in pieces."""
    prepare(pods, "r", "sys.exit(3)")
    started = rank(pods, "r", "--quiet", RANK="0")
    assert started.communicate(timeout=300) == ("", "") and started.returncode == 3
    assert (pods[0].root / "runs/r/attempt-0/rank-0.stderr.log").read_text() == "warn\n"


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("1/0", 1)]
)
def test_it_ends_as_its_rank_ends(pods, end, code):
    prepare(pods, "r", end)
    started = rank(pods, "r", RANK="0")
    started.communicate(timeout=300)
    assert started.returncode == code


def test_output_comes_while_the_rank_runs(pods):
    prepare(pods, "r", "sys.stdout.flush(); time.sleep(60)")
    started = rank(pods, "r", RANK="0")
    assert started.stdout.readline().startswith("0|")
    pods[0].ask("stop", run="r", grace_s=300)
    started.communicate(timeout=300)
    assert started.returncode == 128 + 15


def test_when_it_is_killed_its_rank_goes_on(pods):
    prepare(pods, "r", "sys.stdout.flush(); time.sleep(60)")
    started = rank(pods, "r", RANK="0")
    started.stdout.readline()
    started.kill()
    started.communicate(timeout=300)
    time.sleep(0.5)  # long enough for the agent to end what it should leave
    assert pods[0].poll("r")["ranks"][0]["phase"] == "running"


def test_it_ends_when_nobody_listens_any_more(pods):
    prepare(pods, "r", "sys.stdout.flush(); time.sleep(60)")
    started = rank(pods, "r", RANK="0")
    started.stdout.readline()
    started.stdout.close()
    assert started.wait(timeout=300) == 128 + signal.SIGPIPE
    started.stderr.close()
    assert pods[0].poll("r")["ranks"][0]["phase"] == "running"


def test_when_the_agent_is_killed_it_says_so(pods):
    prepare(pods, "r", "sys.stdout.flush(); time.sleep(60)")
    started = rank(pods, "r", RANK="0")
    started.stdout.readline()
    look_up(pods[0].pid).send(signal.SIGKILL)
    assert "rank 0 of run r" in started.communicate(timeout=300)[1] and started.returncode == 1


def test_a_rank_is_not_started_twice_and_not_where_it_does_not_belong(pods):
    prepare(pods, "r", "")
    rank(pods, "r", RANK="0").communicate(timeout=300)
    again = rank(pods, "r", RANK="0")
    assert (
        says(again.communicate(timeout=300)[1], "rank {} of run {} was started or stopped already")
        and again.returncode == 1
    )
    stranger = rank(pods, "r", RANK="2")
    assert "no agent" in stranger.communicate(timeout=300)[1] and stranger.returncode == 1


def test_without_a_rank_it_asks_for_one(pods):
    started = rank(pods, "r")
    assert "--rank" in started.communicate(timeout=300)[1] and started.returncode == 2


def test_flags_come_before_torch_before_openmpi():
    env = {"RANK": "1", "OMPI_COMM_WORLD_RANK": "2", "MASTER_PORT": "29500"}
    assert place_from({"rank": 0}, env)["rank"] == 0
    assert place_from({"rank": None}, env)["rank"] == 1
    assert (
        place_from({}, env)["master_port"] == 29500 and place_from({}, env)["master_addr"] is None
    )


BOUND = """
import os, time
first = os.sched_getaffinity(0)
while os.environ["WAITS"] and os.sched_getaffinity(0) == first and len(first) > 1:
    time.sleep(0.01)
print("cores", *sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared")
def test_ranks_on_cpus_share_the_cores_of_their_pod_unless_their_user_binds_them(agent):
    cores = sorted(os.sched_getaffinity(0))
    given = shares(cores, 2, 1)
    theirs = {"WAITS": "", "OMP_PLACES": "cores"}
    for run, env, expected in (("ours", {"WAITS": "1"}, given), ("theirs", theirs, [cores] * 2)):
        agent.start(run, BOUND, ranks=2, binding="always", env=env)
        agent.until_exited(run)
        printed = [
            (agent.root / f"runs/{run}/attempt-0/rank-{rank}.stdout.log").read_text().split()[1:]
            for rank in (0, 1)
        ]
        assert printed == [[str(core) for core in each] for each in expected]
