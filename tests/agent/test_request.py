"""The keeper's request as the agent reads it, and the environment of a rank. No process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.agent.ranks.request import (
    RunRequest,
    check_run_id,
    number_in,
    object_in,
    rank_environment,
    texts_in,
    whole_in,
)
from workbench.agent.site.nccl import own_interfaces
from workbench.base.process import RankPlace

RANKS = [
    {"rank": 0, "local_rank": 0, "pod": "pod-0"},
    {"rank": 1, "local_rank": 1, "pod": "pod-0"},
    {"rank": 2, "local_rank": 0, "pod": "pod-1"},
]


def raw(**other: Any) -> dict[str, Any]:
    return {"run": "r1", "ranks": RANKS, "argv": ["python", "train.py"], **other}


def test_a_request_needs_little() -> None:
    request = RunRequest.from_dict({"run": "r1", "ranks": [{"rank": 0}], "argv": ["x"]})
    assert request == RunRequest(
        run="r1",
        success="exit code",
        ranks=(RankPlace(rank=0, local_rank=0, pod=""),),
        argv=("x",),
        entry=None,
        world_size=1,
        master_addr="",
        master_port=0,
        env={},
        cwd=None,
        environment="",
        threads=1,
        binding="",
        restart=0,
        max_restarts=0,
        attempt=0,
    )


def test_a_request_keeps_every_field() -> None:
    fields = {
        "success": "record",
        "entry": "train:main",
        "world_size": 8,
        "master_addr": "10.0.0.1",
        "master_port": 29500,
        "env": {"A": "b"},
        "cwd": "/work",
        "environment": "/store/environment-1",
        "threads": 4,
        "binding": "always",
        "restart": 2,
        "max_restarts": 3,
        "attempt": 5,
    }
    request = RunRequest.from_dict(raw(**fields))
    assert {name: getattr(request, name) for name in fields} == fields
    assert request.argv == ("python", "train.py")


def test_ranks_have_at_least_a_thread_each() -> None:
    assert RunRequest.from_dict(raw(threads=0)).threads == 1


def test_a_pod_finds_its_own_ranks() -> None:
    request = RunRequest.from_dict(raw())
    assert [place.rank for place in request.on("pod-0")] == [0, 1]
    assert [(place.rank, place.local_rank) for place in request.on("pod-1")] == [(2, 0)]
    assert request.on("pod-2") == ()


@pytest.mark.parametrize("name", ["ranks", "argv"])
@pytest.mark.parametrize("value", [[], None, "python", {"rank": 0}])
def test_a_request_without_ranks_or_command_is_refused(name: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=sentence("of the request must be a list with something in it", name)
    ):
        RunRequest.from_dict(raw(**{name: value}))


def test_an_object_must_be_an_object() -> None:
    assert object_in({"env": {"a": 1}}, "env") == {"a": 1}
    assert object_in({}, "env") == {} == object_in({"env": None}, "env")
    with pytest.raises(ValueError, match="env"):
        object_in({"env": ["a"]}, "env")


def test_texts_must_be_texts_and_are_never_shown() -> None:
    assert texts_in({"env": {"a": "b"}}, "env") == {"a": "b"}
    assert texts_in({}, "env") == {}
    for value in (31415, None, ["31415"]):
        with pytest.raises(ValueError, match="env") as error:
            texts_in({"env": {"good": "text", "wrong": value}}, "env")
        assert "31415" not in str(error.value)


def test_whole_numbers_are_0_or_more() -> None:
    assert whole_in({"n": 0}, "n") == 0
    assert whole_in({"n": 7}, "n", 2) == 7
    assert whole_in({}, "n", 2) == 2
    for value in (-1, 1.0, "1", True, None):
        with pytest.raises(
            ValueError, match=sentence("is {}; it must be a whole number, 0 or more", repr(value))
        ):
            whole_in({"n": value}, "n")


def test_numbers_may_have_a_fraction() -> None:
    assert number_in({"n": 2}, "n", 1.0) == 2.0
    assert number_in({"n": 0.5}, "n", 1.0) == 0.5
    assert number_in({}, "n", 1.5) == 1.5
    with pytest.raises(ValueError, match=sentence("is {}; it must be a number", "n", "much")):
        number_in({"n": "much"}, "n", 1.0)


@pytest.mark.parametrize("name", ["a", "_a", "20260101-120000-t5-ab12", "A.b_c-d", "x" * 128])
def test_a_plain_name_is_a_run_id(name: str) -> None:
    assert check_run_id(name) == name


@pytest.mark.parametrize("name", ["", "..", ".a", "-a", "a/b", "x" * 129, "a\n"])
def test_a_path_is_no_run_id(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=sentence(
            "run id {} must be letters, digits, dots, dashes and underscores", repr(name)
        ),
    ):
        check_run_id(name)


def environment(place: RankPlace, base: dict[str, str] | None = None, **other: Any) -> Any:
    request = RunRequest.from_dict(
        raw(master_addr="10.0.0.1", master_port=29500, threads=3, **other)
    )
    return rank_environment(request, place, Path("/pods/pod-1"), base or {}, {"GLOO": "eth0"})


def test_the_pod_s_own_variables_replace_the_keeper_s_defaults_and_not_the_job_s() -> None:
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    defaults = {"NCCL_SOCKET_IFNAME": "=eno1", "GLOO_SOCKET_IFNAME": "eno1"}
    site = {"NCCL_SOCKET_IFNAME": "=ib0,ib1", "OMP_NUM_THREADS": "12"}
    env = environment(place, site, defaults=defaults)
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=ib0,ib1", "eno1")
    assert env["OMP_NUM_THREADS"] == "12"
    env = environment(place, site, defaults=defaults, env={"NCCL_SOCKET_IFNAME": "eth9"})
    assert env["NCCL_SOCKET_IFNAME"] == "eth9"


@pytest.mark.parametrize("given", ["^docker0,lo", "=ib0,ib1", "ib", "ib0:1,ib1", "^=docker0", " "])
def test_a_pod_s_own_choice_of_interfaces_stays_in_every_spelling(given: str) -> None:
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    defaults = {"NCCL_SOCKET_IFNAME": "=eno1", "GLOO_SOCKET_IFNAME": "eno1"}
    site = {"NCCL_SOCKET_IFNAME": given}
    env = environment(place, site, defaults=defaults)
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == (given, "eno1")
    assert own_interfaces({**site, "NCCL_CONF_FILE": "/none"}) == site


def test_an_empty_variable_of_a_pod_is_none() -> None:
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    defaults = {"NCCL_SOCKET_IFNAME": "=eno1", "GLOO_SOCKET_IFNAME": "eno1"}
    empty = dict.fromkeys([*defaults, "OMP_NUM_THREADS", "LAB"], "")
    env = environment(place, empty, defaults=defaults)
    assert defaults.items() <= env.items()
    assert (env["OMP_NUM_THREADS"], env["LAB"]) == ("3", "")
    assert own_interfaces({**empty, "NCCL_CONF_FILE": "/none"}) == {}
    env = environment(place, {}, defaults=defaults, env={"NCCL_SOCKET_IFNAME": ""})
    assert env["NCCL_SOCKET_IFNAME"] == "", "the user's own word"


def test_a_rank_finds_its_place_in_its_environment() -> None:
    place = RankPlace(rank=2, local_rank=0, pod="pod-1")
    env = environment(place, restart=1, max_restarts=4)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [env[name] for name in names] == ["2", "0", "3", "1", "10.0.0.1", "29500"]
    torchrun = ("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert [env[name] for name in torchrun] == ["1", "1", "2", "2", "3"]
    elastic = ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")
    assert [env[f"TORCHELASTIC_{name}"] for name in elastic] == ["r1", "1", "4"]
    assert env["OMP_NUM_THREADS"] == "3" and env["GLOO"] == "eth0"
    assert env["WORKBENCH_RUN_DIR"] == "/pods/pod-1/runs/r1"
    assert env["WORKBENCH_RANK_DIR"] == "/pods/pod-1/runs/r1/rank-2"
    assert "VIRTUAL_ENV" not in env and "PATH" not in env


def test_pods_are_numbered_by_their_lowest_rank() -> None:
    ranks = [{"rank": 1, "pod": "a"}, {"rank": 2, "pod": "a"}, {"rank": 0, "pod": "b"}]
    numbers = [
        environment(RankPlace(rank=rank, local_rank=0, pod=pod), ranks=ranks)["NODE_RANK"]
        for rank, pod in ((0, "b"), (1, "a"))
    ]
    assert numbers == ["0", "1"]


def test_the_job_wins_over_the_pod_but_not_over_the_ranks_place() -> None:
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    base = {"A": "pod", "B": "pod", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    env = environment(place, base, env={"A": "job", "RANK": "9"})
    assert (env["A"], env["B"], env["RANK"]) == ("job", "pod", "0")
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_an_environment_without_a_path_has_the_systems_commands_behind_its_own() -> None:
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    env = environment(place, environment="/store/e")
    assert env["VIRTUAL_ENV"] == "/store/e"
    first, *others = env["PATH"].split(":")
    assert first == "/store/e/bin" and "/usr/bin" in others
