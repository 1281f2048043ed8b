import itertools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.jobs.launcher import Launcher
from workbench.keeper.launch import (
    LaunchCommand,
    LaunchPlan,
    build_command,
    check_launcher_fits,
    place_ranks,
)
from workbench.pods.pod import Pod

PODS = [
    Pod(
        name=f"pod-{n}",
        address=f"127.0.0.{n + 2}",
        slots=1,
        root=f"/w/pods/pod-{n}",
        python="/env/bin/python",
    )
    for n in range(3)
]


def plan(launcher: Launcher, folder: Path = Path("/w")) -> LaunchPlan:
    return LaunchPlan(
        run_id="r1",
        launcher=launcher,
        pods=PODS,
        places=place_ranks(PODS),
        master_port=29511,
        interface="lo",
        network="10.0.7.0/30",
        package="/w/pods/store/workbench-0.zip",
        hostfile=folder / "hostfile",
        ssh_argv={p.name: ["ssh", "-F", str(folder / "ssh_config"), "--", p.address] for p in PODS},
        pdsh_env={"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-F /w/ssh_config"},
        rsh_wrapper=folder / "ssh",
    )


def test_ranks_are_numbered_pod_by_pod() -> None:
    places = place_ranks([replace(PODS[0], slots=2), PODS[1]])
    assert [(p.rank, p.local_rank, p.pod) for p in places] == [
        (0, 0, "pod-0"),
        (1, 1, "pod-0"),
        (2, 0, "pod-1"),
    ]


@pytest.mark.parametrize("launcher", [Launcher.PDSH, Launcher.OPENMPI])
def test_deepspeed_cannot_fall_back_to_this_machine_or_to_the_users_ssh(launcher: Launcher) -> None:
    command = build_command(plan(launcher))
    for flag in ("--force_multi", "--no_ssh_check", "--no_python", "--no_local_rank"):
        assert flag in command.argv
    assert not Path(command.env["DS_ENV_FILE"]).exists()
    at = command.argv.index("--launcher")
    assert command.argv[at + 1] == launcher.value


def test_mpi_gets_the_wrapper_and_the_network() -> None:
    (given,) = [
        a for a in build_command(plan(Launcher.OPENMPI)).argv if a.startswith("--launcher_args=")
    ]
    args = shlex.split(given.removeprefix("--launcher_args="))
    pairs = dict(itertools.pairwise(args))
    assert "plm_rsh_agent" not in pairs, (
        "mpirun hands its arguments on to daemons, which do not find it on their pod"
    )
    assert build_command(plan(Launcher.OPENMPI)).env["OMPI_MCA_plm_rsh_agent"] == "/w/ssh"
    assert pairs["plm_rsh_pass_environ_mca_params"] == "0"
    assert pairs["btl_tcp_if_include"] == pairs["oob_tcp_if_include"] == "10.0.7.0/30"
    assert "MASTER_PORT=29511" in args
    # Without a common network, mpirun finds its daemons by itself.
    alone = replace(plan(Launcher.OPENMPI), network="")
    (given,) = [a for a in build_command(alone).argv if a.startswith("--launcher_args=")]
    assert "btl_tcp_if_include lo" in given
    assert "oob_tcp_if_include" not in given


def test_pdsh_starts_the_python_of_the_pods_which_must_be_one(tmp_path: Path) -> None:
    command = build_command(plan(Launcher.PDSH))
    site = command.env["PYTHONPATH"]
    code = "import deepspeed, os, sys; print(sys.executable, 'WORKBENCH_PODS_PYTHON' in os.environ)"
    argv = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        argv, env={**os.environ, **command.env, "PYTHONPATH": site}, capture_output=True, text=True
    )
    assert done.stdout == "/env/bin/python False\n", done.stderr
    check_launcher_fits(Launcher.PDSH, PODS)
    others = [PODS[0], replace(PODS[1], python="/opt/venv/bin/python")]
    check_launcher_fits(Launcher.SSH, others)
    with pytest.raises(
        ConfigError,
        match=sentence(
            "launcher 'pdsh' starts Python by the same path on all pods",
            "pod-0 has /env/bin/python, pod-1 has /opt/venv/bin/python",
        ),
    ):
        check_launcher_fits(Launcher.PDSH, others)


def test_mpi_is_refused_where_pods_cannot_call_back() -> None:
    forwarded = [replace(pod, ssh_address="127.0.0.1", ssh_port=40_000) for pod in PODS]
    check_launcher_fits(Launcher.PDSH, forwarded)
    with pytest.raises(
        ConfigError,
        match=sentence("launcher 'openmpi' needs pods with a connection to this machine", "pod-0"),
    ):
        check_launcher_fits(Launcher.OPENMPI, forwarded)


def test_ssh_line_starts_one_client_per_rank() -> None:
    script = build_command(plan(Launcher.SSH)).argv[2]
    for rank, pod in enumerate(PODS):
        assert f"-- {pod.address} " in script
        assert (
            f"--rank {rank} --local-rank 0 --world-size 3 "
            "--master-addr 127.0.0.2 --master-port 29511" in script
        )


def test_what_is_printed_of_it_has_a_line_per_rank_and_no_quotes_within_quotes() -> None:
    lines = str(build_command(plan(Launcher.SSH))).splitlines()
    assert [line.count(" --rank ") for line in lines] == [1, 1, 1, 0]
    assert not any("'" in line for line in lines)


def test_ssh_line_returns_the_code_of_a_client_that_failed(tmp_path: Path) -> None:
    codes = {"pod-0": "0", "pod-1": "7", "pod-2": "0"}
    fake = {name: ["sh", "-c", f"exit {code}"] for name, code in codes.items()}
    command = build_command(replace(plan(Launcher.SSH), ssh_argv=fake))
    assert subprocess.run(command.argv, timeout=300, check=False).returncode == 7
    assert subprocess.run(
        ["sh", "-c", f"{command}; echo after"], timeout=300, check=True, capture_output=True
    ).stdout
    assert subprocess.run(["bash", "-c", str(command)], timeout=300, check=False).returncode == 7
    fake["pod-1"] = fake["pod-0"]
    command = build_command(replace(plan(Launcher.SSH), ssh_argv=fake))
    assert subprocess.run(command.argv, timeout=300, check=False).returncode == 0


@pytest.mark.parametrize("launcher", [Launcher.PDSH, Launcher.OPENMPI])
@pytest.mark.parametrize("bad", ["my runs", "a;id", "$(id)", "a'b"])
def test_a_path_that_a_shell_would_read_is_refused(launcher: Launcher, bad: str) -> None:
    with pytest.raises(
        ConfigError, match=sentence("use a folder without blanks and shell characters")
    ):
        build_command(plan(launcher, Path("/w") / bad))


def test_the_printed_line_is_read_by_a_shell_as_it_was_meant() -> None:
    argv = [
        sys.executable,
        "-c",
        "import os, sys; print(os.environ['A B'.replace(' ', '_')], sys.argv[1:])",
        "x y",
        "$z",
    ]
    line = str(LaunchCommand(argv=argv, env={"A_B": "it's $HOME"}))
    out = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert out == "it's $HOME ['x y', '$z']\n"


def test_a_command_survives_json() -> None:
    command = build_command(plan(Launcher.PDSH))
    assert LaunchCommand(**json.loads(json.dumps(asdict(command)))) == command
