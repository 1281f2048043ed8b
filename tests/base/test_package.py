"""The zip of this package for pods: equal bytes from every process, and valid byte code."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from workbench.base import package
from workbench.base.package import package_zip
from workbench.base.versions import installed_versions

PRINT_NAME = "from workbench.base.package import package_zip; print(package_zip()[0])"


def test_every_process_makes_the_same_zip(tmp_path: Path) -> None:
    # What else is imported changes which strings are shared, and the seed the order of sets.
    # Each process has a private folder of its own, so no process reads the zip of another.
    others = ["", "import workbench.agent.supervisor, pydantic, paramiko\n"]
    names = {
        subprocess.run(
            [sys.executable, "-c", more + PRINT_NAME],
            env={
                **os.environ,
                "PYTHONHASHSEED": str(seed),
                "XDG_STATE_HOME": str(tmp_path / str(seed)),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed, more in enumerate(others)
    }
    assert names == {package_zip()[0]}


def test_a_second_start_reads_the_zip_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = package_zip()
    with monkeypatch.context() as patched:
        patched.setattr(package, "_make_zip", None)
        assert package_zip() == first
    # Other code has another zip, and the zip of earlier code goes.
    home = tmp_path / "home"
    (home / "workbench").mkdir(parents=True)
    monkeypatch.setattr(package, "HOME", str(home))
    for source in ("a = 1\n", "a = 2\n"):
        (home / "workbench" / "own.py").write_text(source)
        _, data = package_zip()
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            assert packed.read("workbench/own.py").decode() == source
    assert len([*tmp_path.rglob("*.zip")]) == 1


def test_a_zip_is_not_taken_from_a_folder_that_is_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    own = package_zip()
    (kept,) = state.rglob("*.zip")
    kept.write_bytes(b"code of another user")
    state.chmod(0o777)
    assert package_zip() == own


def run_from(archive: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code that imports the package from a zip, away from the checkout."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(archive)},
        capture_output=True,
        text=True,
        check=True,
        cwd=archive.parent,
    )


def test_a_pod_imports_byte_code_and_tracebacks_show_source_lines_without_our_folders(
    tmp_path: Path,
) -> None:
    name, data = package_zip()
    (tmp_path / name).write_bytes(data)
    code = "import logging, workbench.agent.supervisor as it\nprint(it.__file__)\n"
    code += (
        "try:\n    it.Agent.end(None, '')\nexcept AttributeError:\n    logging.exception('ended')\n"
    )
    done = run_from(tmp_path / name, code)
    assert done.stdout.strip() == f"{tmp_path / name}/workbench/agent/supervisor.pyc"
    assert 'File "workbench/agent/supervisor.py", line' in done.stderr
    assert "if self._end_by is not None:" in done.stderr


def test_another_python_takes_the_source(tmp_path: Path) -> None:
    name, data = package_zip()
    magic = b"\0\0\r\n"  # of no Python that there is
    with (
        zipfile.ZipFile(io.BytesIO(data)) as packed,
        zipfile.ZipFile(tmp_path / name, "w") as other,
    ):
        for member in packed.namelist():
            content = packed.read(member)
            other.writestr(member, magic + content[4:] if member.endswith(".pyc") else content)
    code = "import workbench.base.process as it; print(it.__file__)"
    done = run_from(tmp_path / name, code)
    assert done.stdout.strip().endswith("/process.py")


def test_versions_are_those_that_pip_knows() -> None:
    found = installed_versions()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["deepspeed"] == importlib.metadata.version("deepspeed")


def test_records_of_options_read_no_source_on_a_pod(tmp_path: Path) -> None:
    # In a zip, inspect compares each loaded module for each class: seconds beside torch.
    name, data = package_zip()
    (tmp_path / name).write_bytes(data)
    code = "import inspect\ninspect.getmodule = None\n"
    code += "from workbench.finetune.options.options import FineTuneOptions as it\n"
    code += "print(sorted(it.model_fields)[0])\n"
    assert run_from(tmp_path / name, code).stdout.strip() == "adam_beta1"
