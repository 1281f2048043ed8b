"""Wheel and source archive, installed outside the checkout, train; a notebook needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.fakes.sshhosts import HostsPlace

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).resolve().parent.parent
SPEC = {
    "cluster": {"backend": {"kind": "local"}, "pods": {"cpus": 1}, "count": 2},
    "job": {
        "dataset": {"kind": "wikisql-mini", "train_rows": 50, "eval_rows": 5},
        "technique": "zero1",
        "max_steps": 2,
        "predict_rows": 0,
    },
}
Run = Callable[..., str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that was built from the archive."""
    folder = tmp_path_factory.mktemp("built")
    backend = tmp_path_factory.mktemp("backend")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--target", str(backend), "hatchling"], check=True, timeout=300)

    def build(source: Path, kind: str) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
        env = {**os.environ, "PYTHONPATH": str(backend)}
        done = subprocess.run(
            command, cwd=source, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr

    build(ROOT, "sdist")
    unpacked = tmp_path_factory.mktemp("unpacked")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    build(source, "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def outside(wheel: Path, home: Path, *, without: str = "") -> Run:
    """Install the wheel beside the packages of this environment, but those of one extra.

    Return a function that runs a program of the new environment.
    """
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    install = ["install", "-q", "--no-deps", "--no-compile", str(wheel)]
    python = str(home / "bin" / "python")
    subprocess.run([*pip, "--python", python, *install], check=True, timeout=300)
    # The other packages lie beside it, as after `pip install`: neither this checkout, which a .pth
    # file names, nor a package of the extra.
    (packages,) = home.glob("lib/python*/site-packages")
    hidden = {entry for name in ("deepspeed-workbench", *extra(without)) for entry in tops(name)}
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        beside = packages / entry.name
        if entry.suffix != ".pth" and entry.name not in hidden and not beside.exists():
            beside.symlink_to(entry)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*argv: str) -> str:
        argv = (str(home / "bin" / argv[0]), *argv[1:])
        done = subprocess.run(
            argv, cwd=home.parent, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import workbench; print(workbench.__file__)")
    assert where.startswith(str(packages))
    return run


def extra(name: str) -> list[str]:
    """Names of the packages of an extra of the project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return [Requirement(need).name for need in extras[name]] if name else []


def tops(package: str) -> set[str]:
    """Names of what a package has at the top of the folder of packages."""
    files = distribution(package).files
    assert files
    return {file.parts[0] for file in files}


def test_everything_that_is_tracked_is_packed(wheel: Path, built: Path) -> None:
    tracked = ["git", "ls-files"]
    listed = subprocess.run(
        tracked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        assert set(listed) - {name.partition("/")[2] for name in file.getnames()} == set()
    expected = {
        name if name.startswith("workbench/") else f"workbench/{name}"
        for name in listed
        if name.startswith(("workbench/", "dsconfig/"))
    }
    packed = set(ZipFile(wheel).namelist())
    assert expected - packed == set()
    shared = {name.partition(".data/data/")[2] for name in packed}
    labextension = "share/jupyter/labextensions/deepspeed-workbench"
    for name in (f"{labextension}/package.json", f"{labextension}/static/remoteEntry.js"):
        assert name in shared
    assert "etc/jupyter/jupyter_server_config.d/deepspeed-workbench.json" in shared


def test_its_command_trains_and_reports_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    run = outside(wheel, tmp_path / "venv")
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    facts = json.loads(run("workbench", "run", "spec.json", "--out", "run", "--json", "-"))
    assert (facts["state"], facts["steps"], facts["world_size"]) == ("succeeded", 2, 2)
    assert facts["path"] == str(tmp_path / "run")
    run("workbench", "report", "run", "--out", "report")
    assert "<table" in next((tmp_path / "report").glob("*.html")).read_text()


NOTEBOOK = """
import json, sys
from importlib.util import find_spec
import workbench
import workbench.data
import workbench.display.views
from workbench import Cluster, FineTune, PodSpec, SSHPods
from workbench.errors import ConfigError

assert not [name for name in sys.argv[2:] if find_spec(name)], "the environment has them"
for name in workbench.__all__:
    getattr(workbench, name)


def refused(work):
    try:
        work()
    except ConfigError as error:
        return str(error)
    return "not refused"


job = FineTune(model="tiny-t5", dataset="wikisql-mini", technique="single", max_steps=2,
               predict_rows=2)
with Cluster(SSHPods(**json.loads(sys.argv[1])), PodSpec(cpus=1), count=1) as cluster:
    run = cluster.submit(job)
    result = run.wait(progress=False)
result.to_html("card.html")
small = FineTune(model="tiny-t5", dataset="wikisql-mini", max_source_length=77)
print(json.dumps({
    "state": result.state,
    "steps": result.steps,
    "answers": len(result.predictions.rows),
    "rows": len(workbench.history(run.path)),
    "refused": [
        refused(lambda: workbench.plan(small)),
        refused(lambda: workbench.preview(job)),
        refused(lambda: run.predict(["Who?"])),
        refused(lambda: workbench.data.train_tokenizer(["a"])),
    ],
}))
"""


def test_a_notebook_without_torch_trains_on_hosts_that_have_it(wheel: Path, tmp_path: Path) -> None:
    run = outside(wheel, tmp_path / "venv", without="worker")
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    with HostsPlace(tmp_path / "place") as place:
        hosts = {"hosts": [place.hosts[0].address], **place.options}
        said = run("python", "notebook.py", json.dumps(hosts), *extra("worker"))
    facts = json.loads(said.splitlines()[-1])
    assert (facts["state"], facts["steps"], facts["answers"], facts["rows"]) == (
        "succeeded",
        2,
        2,
        1,
    )
    for refusal in facts["refused"]:
        assert "extra 'worker'" in refusal
    assert "<html" in (tmp_path / "card.html").read_text()
