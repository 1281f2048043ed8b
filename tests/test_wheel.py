"""The wheel, installed outside the checkout, has all that its command needs to train and report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).resolve().parent.parent
SPEC = {
    "cluster": {"backend": {"kind": "local"}, "pods": {"cpus": 1}, "count": 3, "warm": False},
    "job": {
        "dataset": {"kind": "wikisql-mini", "train_rows": 50, "eval_rows": 5},
        "technique": "zero1",
        "max_steps": 4,
        "predict_rows": 0,
    },
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    done = subprocess.run(
        [*pip, "-w", str(folder), str(ROOT)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_everything_that_is_tracked_is_packed(wheel: Path) -> None:
    tracked = ["git", "ls-files", "workbench", "dsconfig"]
    listed = subprocess.run(
        tracked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {name if name.startswith("workbench/") else f"workbench/{name}" for name in listed}
    packed = set(ZipFile(wheel).namelist())
    assert expected - packed == set()
    shared = {name.partition(".data/data/")[2] for name in packed}
    labextension = "share/jupyter/labextensions/deepspeed-workbench"
    for name in (f"{labextension}/package.json", f"{labextension}/static/remoteEntry.js"):
        assert name in shared
    assert "etc/jupyter/jupyter_server_config.d/deepspeed-workbench.json" in shared


def test_its_command_trains_and_reports_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(home / "bin" / "python"),
    ]
    install = ["install", "-q", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=300)
    (packages,) = home.glob("lib/python*/site-packages")
    # What it depends on is that of this environment; a
    # .pth inside that, to this checkout, is not followed.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*argv: str) -> str:
        argv = (str(home / "bin" / argv[0]), *argv[1:])
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("python", "-c", "import workbench; print(workbench.__file__)").startswith(
        str(packages)
    )
    assert "Run succeeded" in run("workbench", "run", "spec.json", "--out", "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["world_size"]) == (4, 3)
    run("workbench", "report", "run", "--out", "report")
    assert "<table" in next((tmp_path / "report").glob("*.html")).read_text()
