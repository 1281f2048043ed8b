"""`python -m workbench run`: exit codes, refusals, lists and completions."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.sentences import says
from tests.support.writtenrun import write_run
from workbench import Cluster, LocalPods
from workbench.base.versions import VERSION
from workbench.cli import main
from workbench.client.run import Run
from workbench.rundir.state import RunState
from workbench.rundir.status import cluster_status

MINI = {"kind": "wikisql-mini", "train_rows": 50, "eval_rows": 5}
LOCAL = {"backend": {"kind": "local"}, "pods": {"cpus": 1}, "count": 3}


def spec(folder: Path, job: dict[str, object], cluster: dict[str, object] | None = None) -> str:
    path = folder / "asked.json"
    path.write_text(json.dumps({"cluster": cluster or LOCAL, "job": {"dataset": MINI, **job}}))
    return str(path)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"technique": "zero-1"}, "Allowed: single, ddp, zero1, zero2, zero3, zero3-offload, fsdp"),
        ({"launcher": "slurm"}, "Allowed: ssh, pdsh, openmpi"),
        ({"dataset": {"kind": "csv"}}, "Allowed: wikisql-mini, files, release, hub"),
        (
            {"model": "./no-such-model"},
            "is neither a folder on this machine nor a hub id; allowed: 'tiny-t5'",
        ),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"precision": "fp16"}, "T5 family overflow"),
        ({"technique": "zero1", "deepspeed": {"zero_optimization": {"stage": 3}}}, "stage"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}, "elasticity": {}}}, "elasticity"),
        ({"deepspeed": "no-such.json"}, "no-such.json"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 1}, "train_batch_size": 7}},
            "train_batch_size",
        ),
        ({"technique": "single", "launcher": "pdsh"}, "runs one process"),
    ],
)
def test_what_is_refused_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: dict[str, object], said: str
) -> None:
    out = tmp_path / "out"
    assert main(["run", spec(tmp_path, job), "--out", str(out)]) == 2
    assert said in capsys.readouterr().out
    assert not out.exists()


def test_broken_deepspeed_json_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text('{\n  "zero_optimization": {"stage": 1},\n}\n')
    assert (
        main(["run", spec(tmp_path, {"deepspeed": "mine.json"}), "--out", str(tmp_path / "out")])
        == 2
    )
    said = capsys.readouterr().out
    assert "mine.json" in said
    assert "line 3" in said or ":3" in said


def test_broken_rows_name_file_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"table_id": "1-1", "question": "Who?", "sql": {"sel": "Name", "conds": [], "agg": ""}}
    bad = {**good, "sql": {"sel": "Name", "conds": [], "agg": "MEDIAN"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps(good) + "\n")
    data = {"kind": "files", "train": "train.jsonl", "eval": "eval.jsonl"}
    assert main(["run", spec(tmp_path, {"dataset": data}), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    for part in ("train.jsonl", "2", "agg", "MEDIAN"):
        assert part in said


def test_a_missing_spec_and_one_that_is_not_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path / "none.json")]) == 2
    (tmp_path / "bad.json").write_text("{")
    assert main(["run", str(tmp_path / "bad.json")]) == 2
    assert says(capsys.readouterr().out, "the spec {} is not JSON")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"workbench {VERSION}\n"


def test_runs_are_listed_as_text_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, loss in (("worse", 0.5), ("better", 0.25)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        about = {"id": name, "cluster": str(tmp_path), "submitted_s": 1e9}
        (folder / "run.json").write_text(json.dumps(about))
        (folder / "spec.json").write_text(json.dumps({"job": {"kind": "finetune", "seed": loss}}))
        result = {"state": "succeeded", "eval_loss": loss, "hosts": []}
        (folder / "result.json").write_text(json.dumps(result))
    asked = ["ls", str(tmp_path), "--sort=eval_loss"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert 0 < said.index("better") < said.index("worse")
    assert main([*asked, "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["folder"] == str(tmp_path)
    facts = ("id", "state", "eval_loss", "option.seed", "path")
    below = tmp_path / "runs"
    assert [tuple(row[name] for name in facts) for row in listed["runs"]] == [
        ("better", "succeeded", 0.25, 0.25, str(below / "better")),
        ("worse", "succeeded", 0.5, 0.5, str(below / "worse")),
    ]
    assert main(["ls", str(tmp_path), "--name", "wor", "--json", str(tmp_path / "a.json")]) == 0
    assert "better" not in capsys.readouterr().out
    assert [row["id"] for row in json.loads((tmp_path / "a.json").read_text())["runs"]] == ["worse"]
    assert main(["ls", str(tmp_path), "--state", "failed", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []


def test_a_run_is_read_and_ended_by_its_id_or_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "c")
    run.state("running", "training")
    run.log(0, "".join(f"line {number}\n" for number in range(300)))
    run.log(1, "@workbench {}\n")
    id_ = run.paths.root.name
    assert main(["logs", id_]) == 0
    assert capsys.readouterr().out.splitlines() == [f"line {number}" for number in range(100, 300)]
    assert main(["logs", str(run.paths.root), "--tail", "0"]) == 0
    assert capsys.readouterr().out.startswith("line 0\n")
    assert main(["logs", id_, "--rank", "1"]) == 0
    assert says(capsys.readouterr().out, "Losses and other figures are no part of the log", 1, id_)
    assert main(["logs", id_, "--tail=-5"]) == 2
    assert main(["logs", id_, "--rank", "7"]) == 1
    assert main(["logs", "none"]) == 1
    # The keeper of this made-up cluster is the test itself, and answers nobody.
    assert main(["stop", id_]) == 1
    run.end("failed", "rank 1 ended with 1")
    capsys.readouterr()
    assert main(["stop", id_]) == 0
    assert main(["attach", id_, "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out.partition("failed.\n")[2])["state"] == "failed"
    shutil.copytree(run.paths.root, tmp_path / "again")
    assert main(["logs", id_]) == 2
    assert says(capsys.readouterr().out, "runs have the name {}: {}. Give a directory.", 2, id_)


def test_beside_json_a_refusal_is_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path), "--state", "ended", "--json", "-"]) == 2
    wrote = capsys.readouterr()
    assert (wrote.out, "queued" in wrote.err) == ("", True)
    lost = str(tmp_path / "no" / "plan.json")
    assert main(["plan", spec(tmp_path, {}), "--json", lost]) == 2
    assert says(
        capsys.readouterr().out, "--json {}: its folder does not exist; make the folder first", lost
    )


def test_a_plan_as_json_has_every_technique(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**LOCAL, "pods": {"cpus": 1, "memory_gib": 4}}
    asked = spec(tmp_path, {"technique": "zero2"}, small)
    assert main(["plan", asked, "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["technique"], plan["pods"], plan["memory_gib"]) == (
        True,
        "zero2",
        3,
        4,
    )
    assert {"single", "zero2", "fsdp"} <= {row["technique"] for row in plan["rows"]}
    assert main(["plan", asked, "--gpus-for", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["kind"]: row["gpus"] for row in rows}["T4"] == 1


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("workbench comp", "completion"),
        ("workbench plan --gpu", "--gpu-memory-gib --gpus-for"),
        ("workbench plan as", "asked.json"),
        ("workbench completion z", "zsh"),
    ],
)
def test_a_shell_completes_commands_options_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, offered: str
) -> None:
    spec(tmp_path, {})
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    words = typed.split()
    asking = (
        "source ./script; COMP_WORDS=($0); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "
        "$(complete -p workbench | grep -o '_shtab_[a-z_]*') 2> /dev/null; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        ["bash", "-c", asking.replace("$0", " ".join(words))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == offered.split()


@pytest.mark.slow
def test_pods_of_a_cluster_are_listed_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(LocalPods(), count=1, path=tmp_path / "mine", warm=False).start()
    try:
        capsys.readouterr()
        assert main(["ls", str(tmp_path), "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["clusters"] == [str(cluster.path)]
        assert main(["ls", str(tmp_path)]) == 0
        assert str(cluster.path) in capsys.readouterr().out
        assert main(["stop", "--kill", str(cluster.path)]) == 2
        assert cluster_status(cluster.path).phase == "ready"
        assert main(["stop", str(cluster.path)]) == 0
    finally:
        cluster.close()
    assert cluster_status(cluster.path).phase == "closed"
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["clusters"] == []
    assert main(["stop", str(cluster.path)]) == 1


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh", "powershell"])
def test_there_is_a_completion_for_other_shells(
    capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    assert main(["completion", shell]) == 0
    assert "gpus-for" in capsys.readouterr().out


@pytest.mark.slow
def test_the_doctor_looks_at_the_pods_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = spec(tmp_path, {}, {**LOCAL, "count": 1})
    with TemporaryDirectory() as other:
        file = Path(other) / "findings.json"
        assert main(["doctor", pods, "--json", str(file)]) == 0
        found = json.loads(file.read_text())
    assert (found["ok"], len(found["hosts"])) == (True, 1)
    checks = {each["check"]: each["verdict"] for each in found["hosts"][0]["findings"]}
    assert checks["ssh"] == "good"
    said = capsys.readouterr().out
    assert "1 host: all checks passed" in said
    assert "not measured (there is one pod" in said
    assert [path.name for path in tmp_path.iterdir()] == ["asked.json"]
    assert main(["doctor", spec(tmp_path, {}, {**LOCAL, "count": 0})]) == 2


def test_a_directory_with_another_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "spec.json").write_text("mine")
    assert main(["run", spec(tmp_path, {}), "--out", str(out)]) == 2
    assert says(capsys.readouterr().out, "already holds a run or a cluster")
    assert (out / "spec.json").read_text() == "mine"


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = {**LOCAL, "backend": {"kind": "local", "port": port}}
        assert main(["run", spec(tmp_path, {}, cluster), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert str(port) in said
    assert "127.0.0.3" in said


@pytest.mark.parametrize(("program", "launcher"), [("pdsh", "pdsh"), ("mpirun", "openmpi")])
def test_a_missing_program_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, program: str, launcher: str
) -> None:
    # A PATH with everything but the program.
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in [*os.environ["PATH"].split(":"), "/usr/sbin"]:
        for tool in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if tool.name != program and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "workbench",
            "run",
            spec(tmp_path, {"launcher": launcher}),
            "--out",
            str(tmp_path / "o"),
        ],
        env={**os.environ, "PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert program in done.stdout
    assert "apt-get install" in done.stdout


@pytest.mark.slow
def test_pods_that_cannot_be_reached_leave_a_result_that_says_so(tmp_path: Path) -> None:
    """The deadline is over before all workers can have reported."""
    cluster = {**LOCAL, "start_timeout_s": 0.001}
    out = tmp_path / "out"
    assert main(["run", spec(tmp_path, {}, cluster), "--out", str(out)]) == 1
    run = Run.load(out)
    assert run.state is RunState.FAILED
    assert run.result.error is not None
    assert says(run.result.error.message, "of {} workers reported in {} s; missing", 3, 0)


@pytest.mark.slow
def test_a_run_that_fails_exits_with_1_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script = tmp_path / "script" / "fails.py"
    script.parent.mkdir()
    script.write_text("raise ValueError('of the script')\n")
    asked = tmp_path / "asked.json"
    cluster = {**LOCAL, "count": 1}
    asked.write_text(
        json.dumps({"cluster": cluster, "job": {"kind": "script", "path": str(script)}})
    )
    assert main(["run", str(asked), "--out", str(out), "--json", str(tmp_path / "a.json")]) == 1
    result = Run.load(out).result
    facts = json.loads((tmp_path / "a.json").read_text())
    assert (facts["state"], facts["path"]) == ("failed", str(out))
    record = json.loads((out / "cluster" / "cluster.json").read_text())
    assert record["warm"] is False, "no warm process serves a script"
    assert result.error is not None
    assert result.error.host.startswith("127.0.0.")
    assert "Traceback" in result.error.traceback
    assert "Run failed" in capsys.readouterr().out


ODD = [
    *("", "-", "a\0b", "\udcff", "a\nb", "\x1b[31mx", "~no-such-person/y", "a" * 5000, "x/" * 3000),
    *("pipe", "bytes.json", "deep.json", "number.json", "list.json", "nul.json", "9" * 5000, "nan"),
    *("-1", "1e400", "٣", "*", "["),
]
PLACES = [
    *("run {}", "run list.json --out {}", "doctor {}", "plan {}", "plan bytes.json --json {}"),
    *(
        "plan nul.json --gpu-memory-gib {}",
        "ls {}",
        "ls --name {}",
        "ls --state {}",
        "ls --sort {}",
    ),
    *(
        "ls --json {}",
        "logs {}",
        "logs x --rank {}",
        "logs x --tail {}",
        "stop {}",
        "stop {} --kill",
    ),
    *("attach {}", "report {}", "report x --out {}", "completion {}", "verify {} --list"),
    *("verify --list --only {}", "verify --list --minutes {}", "{}"),
]


@pytest.mark.parametrize("place", PLACES)
def test_no_word_ends_a_command_with_a_traceback_or_reaches_the_terminal_as_a_control(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("bytes.json").write_bytes(b"\xff\xfe{")
    Path("deep.json").write_text("[" * 100_000)
    Path("number.json").write_text('{"job": {"kind": "finetune", "max_steps": ' + "9" * 6000 + "}}")
    Path("list.json").write_text("[]")
    Path("nul.json").write_text('{"job": {"kind": "script", "path": "a\\u0000b"}}')
    for word in ODD:
        argv = [word if each == "{}" else each for each in place.split()]
        try:
            code = main(argv)
        except SystemExit as end:  # of argparse
            code = end.code  # type: ignore[assignment]
        assert code in (0, 1, 2)
        told = "".join(capsys.readouterr())
        assert "\x1b" not in told and "\0" not in told, told[-200:]
