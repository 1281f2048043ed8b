"""The site's files for NCCL win over the keeper's defaults."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.agent.ranks.request import RunRequest, rank_environment
from workbench.agent.site import nccl
from workbench.base.process import RankPlace

OURS = {"NCCL_SOCKET_IFNAME": "=eno1", "GLOO_SOCKET_IFNAME": "eno1"}
LINES = "# the site's\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==ib0,ib1\nno value\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nccl, "_SITE", tmp_path / "nccl.conf")
    monkeypatch.setattr(nccl.pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))  # type: ignore[attr-defined]
    return tmp_path


@pytest.mark.parametrize("name", ["nccl.conf", ".nccl.conf", "own.conf"])
def test_a_name_that_a_file_of_nccl_sets_is_not_set_by_a_variable(home: Path, name: str) -> None:
    env = {"NCCL_CONF_FILE": str(home / "own.conf")} if name == "own.conf" else {}
    assert nccl.left_open(OURS, env) == OURS
    (home / name).write_text(LINES)
    assert nccl.left_open(OURS, env) == {"GLOO_SOCKET_IFNAME": "eno1"}
    place = RankPlace(rank=0, local_rank=0, pod="pod-0")
    request = RunRequest.from_dict(
        {
            "run": "r1",
            "ranks": [{"rank": 0, "local_rank": 0, "pod": "pod-0"}],
            "argv": ["python"],
            "defaults": OURS,
            "env": env,
        }
    )
    rank = rank_environment(request, place, Path("/pods/pod-0"), {}, {})
    assert "NCCL_SOCKET_IFNAME" not in rank
    assert rank["GLOO_SOCKET_IFNAME"] == "eno1"


def test_a_file_that_names_another_variable_or_cannot_be_read_changes_nothing(home: Path) -> None:
    (home / "nccl.conf").write_text("#NCCL_SOCKET_IFNAME=ib0\nNCCL_IB_HCA=mlx5\n")
    (home / ".nccl.conf").mkdir()
    assert nccl.left_open(OURS, {}) == OURS
    (home / "own.conf").write_text(LINES)
    assert nccl.left_open(OURS, {"NCCL_CONF_FILE": str(home / "own.conf")}) != OURS


def test_an_account_without_a_name_has_no_file_of_its_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_uid: int) -> None:
        raise KeyError

    (home / ".nccl.conf").write_text(LINES)
    monkeypatch.setattr(nccl.pwd, "getpwuid", unknown)  # type: ignore[attr-defined]
    assert nccl.left_open(OURS, {}) == OURS
