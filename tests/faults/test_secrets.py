"""Secrets of a job, of 20 kinds, in 6 places: none is left on disk, and none is in `ps`."""

from __future__ import annotations

import json
import random
import resource
import string
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench import Cluster, FineTune, LocalPods, PodSpec, Script
from workbench.base.errors import ConfigError
from workbench.base.files import read_json
from workbench.benchmark.result import rows_below, write_report
from workbench.finetune.job.deepspeed_config import resolve
from workbench.jobs.script_folder import check_args
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState

LAUNCHERS = ("ssh", "pdsh", "openmpi")
LEAK = Path(__file__).parent.parent / "scripts" / "leak.py"
_DRAW = random.Random()


def drawn(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "q7" + "".join(_DRAW.choices(letters, k=length - 2))


def kinds() -> Mapping[str, tuple[str, str]]:
    """By kind: a text as it is given and printed, and the part of it that nobody may see."""
    upper, hexadecimal = string.ascii_uppercase + string.digits, "0123456789abcdef"
    lines = [drawn(64), drawn(64), drawn(20)]
    body = "\n".join(lines)
    plain = {
        "hugging face": "hf_" + drawn(34),
        "aws key": "AKIA" + _DRAW.choice(upper) + "".join(_DRAW.choices(upper, k=15)),
        "github": "ghp_" + drawn(36),
        "github, fine-grained": "github_pat_" + drawn(40),
        "gitlab": "glpat-" + drawn(20),
        "openai": "sk-proj-" + drawn(40),
        "slack": "xoxb-1234567890-" + drawn(24),
        "google": "AIza" + drawn(35),
        "nvidia": "nvapi-" + drawn(60),
        "npm": "npm_" + drawn(36),
        "pypi": "pypi-" + drawn(60),
        "jwt": f"eyJ{drawn(20)}.{drawn(40)}.{drawn(30)}",
    }
    within = {
        "slack webhook": (
            "https://hooks.slack.com/services/{}",
            f"T{drawn(8)}/B{drawn(8)}/{drawn(24)}",
        ),
        "bearer": ("Authorization: Bearer {}", drawn(30)),
        "database": ("postgresql://me:{}@db.example.org:5432/rows", drawn(14)),
        "sentry": ("https://{}@sentry.example.org/4", drawn(32, hexadecimal)),
        "azure": ("AccountName=me;AccountKey={};EndpointSuffix=core.windows.net", drawn(80) + "=="),
        "password": ("password={}", drawn(16)),
        "api key": ("api_key={}", drawn(40, hexadecimal)),
        "private key": (
            "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----",
            body,
        ),
    }
    return {name: (text, text) for name, text in plain.items()} | {
        name: (text.format(hidden), hidden) for name, (text, hidden) in within.items()
    }


def seen_in(text: bytes, secrets: Mapping[str, str]) -> list[str]:
    return [
        kind
        for kind, hidden in secrets.items()
        if any(line.encode() in text for line in hidden.split("\n"))
    ]


def left_in(folder: Path, secrets: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Every file that holds one; what is zipped is looked into."""
    for path in folder.rglob("*"):
        if path.is_file():
            texts = [path.read_bytes()]
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    texts += [archive.read(name) for name in archive.namelist()]
            if held := seen_in(b"\0".join(texts), secrets):
                yield str(path.relative_to(folder)), held


@pytest.mark.slow
def test_nothing_is_left_of_secrets_and_ps_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 51, under every launcher: secrets of a job's, a pod's environment and a script's own."""
    jobs, pods, own = kinds(), kinds(), kinds()
    assert len(own) == 20
    job_env = {f"JOB_{n:02}": text for n, (text, _) in enumerate(jobs.values())}
    pod_env = {f"POD_{n:02}": text for n, (text, _) in enumerate(pods.values())}
    monkeypatch.setenv("WORKBENCH_TEST_REFERENCE", (reference := drawn(30)))
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{(proxy := drawn(20))}@proxy.example.org:3128")
    job_env |= {
        "BACKWARDS": json.dumps([text[::-1] for text, _ in own.values()]),
        "JOB_REF": "me:${WORKBENCH_TEST_REFERENCE}",
    }
    secrets = {
        f"{where}: {kind}": hidden
        for where, all_ in (("job", jobs), ("pod", pods), ("printed", own))
        for kind, (_, hidden) in all_.items()
    } | {"reference": reference, "proxy": proxy}
    args = ["--login=${JOB_00}", *(f"${{{name}}}" for name in job_env if name.startswith("JOB_"))]
    shown: list[str] = []
    done = threading.Event()
    watcher = threading.Thread(target=watch_command_lines, args=(secrets, shown, done))
    watcher.start()
    try:
        with Cluster(
            LocalPods(), PodSpec(env=pod_env), count=2, path=tmp_path / "c", warm=False
        ) as cluster:
            runs = []
            texts = [repr(cluster), str(cluster)]
            for launcher in LAUNCHERS:
                run = cluster.submit(
                    Script(path=str(LEAK), args=args, env=job_env, launcher=launcher)
                )
                result = run.wait(300, progress=False)
                assert (result.state, result.error and result.error.kind) == (
                    RunState.FAILED,
                    "RuntimeError",
                )
                assert run.logs(0, "stdout", tail=None).count("found *") >= 2 * len(jobs), (
                    "it has printed them"
                )
                assert len([event for event in run.events() if event.kind == "mine"]) == 2 * (
                    3 * 20 + 1 + len(args)
                )
                texts += [repr(run), str(run), run._repr_html_(), repr(result), str(result)]
                texts += [
                    run.logs(rank, stream, tail=None)
                    for rank in (0, 1)
                    for stream in ("stdout", "stderr")
                ]
                result.to_html(tmp_path / f"{launcher}.html")
                runs.append(run)
            held = [
                path
                for path, _ in left_in(tmp_path, {"proxy": proxy})
                if not path.endswith(".stdout.log")
            ]
            assert held == [], "while the pods live, but for what the ranks have printed there"
    finally:
        done.set()
        watcher.join(300)
    rows, problems = rows_below([tmp_path / "c"])
    write_report(rows, tmp_path, problems=problems)
    assert (len(rows), problems) == (len(LAUNCHERS), [])
    assert [at for at, text in enumerate(texts) if seen_in(text.encode(), secrets)] == []
    assert list(left_in(tmp_path, secrets)) == []
    assert shown == []
    for run in runs:
        env = read_json(run.paths.spec)["job"]["env"]  # type: ignore[index]
        assert env == {name: f"${{{name}}}" for name in job_env}
        monkeypatch.setenv("JOB_00", "mine")
        for name in (job_env | pod_env).keys() - {"JOB_00"}:
            monkeypatch.setenv(name, "mine too")
        again = RunSpec.load(run.paths.spec)
        assert again.job.env["JOB_00"] == "${JOB_00}", "reading resolves nothing"
        assert again.resolved().job.env["JOB_00"] == "mine"


def watch_command_lines(
    secrets: Mapping[str, str], shown: list[str], done: threading.Event
) -> None:
    """Look at every command line of the machine, some ten times a second."""
    while not done.wait(0.1):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                shown += seen_in(path.read_bytes(), secrets)
            except OSError:
                continue


@pytest.mark.parametrize("kind", kinds())
def test_as_a_literal_argument_it_is_refused(kind: str) -> None:
    text, hidden = kinds()[kind]
    for args in ([text], [f"--login={text}"], ["--lr", "0.1", "--login", text]):
        with pytest.raises(
            ConfigError, match=sentence("and `ps` on a pod shows arguments to every user there")
        ) as refused:
            check_args(args, {})
        assert hidden not in str(refused.value)


@pytest.mark.parametrize("kind", kinds())
def test_in_a_deepspeed_json_it_is_refused(kind: str) -> None:
    text, hidden = kinds()[kind]
    config = {
        "zero_optimization": {"stage": 1},
        "wandb": {"enabled": True, "group": f"mine {text}"},
    }
    with pytest.raises(
        ConfigError, match=sentence("which would be written to the run directory")
    ) as refused:
        resolve(FineTune(technique="zero1", deepspeed=config), gpus=0)
    assert hidden not in str(refused.value)


CRASH = """
import os, signal
secret = os.environ["MY_VALUE"]
print(len(secret), flush=True)
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_rank_that_crashes_leaves_no_core_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("no process here may write a core file")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text(CRASH)
    job = Script(tmp_path / "job" / "train.py", outputs=["*"], env={"MY_VALUE": drawn(40)})
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        with Cluster(LocalPods(), PodSpec(), path=tmp_path / "c", warm=False) as cluster:
            result = cluster.submit(job).wait(progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert "SIGSEGV" in result.message
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("core")]
