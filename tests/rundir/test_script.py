"""What of a script's folder travels to the pods, and what is refused before anything starts."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import sentence
from workbench import PodSpec, Script
from workbench.base.errors import ConfigError
from workbench.jobs.job import PodView
from workbench.jobs.script_folder import (
    IGNORE_FILE,
    check_script,
    files_of,
    left_out,
    script_files,
    zip_script,
)
from workbench.keeper.run.stage import sent_inputs
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

EVERYTHING = (
    *(
        "train.py",
        "lib/model.py",
        "data/rows.bin",
        "data/keep.txt",
        "notes/data/deep.bin",
        "report.log",
        "kept.log",
    ),
    *(
        ".git/config",
        "lib/__pycache__/model.cpython-311.pyc",
        "old.pyc",
        ".venv/bin/python",
        "node_modules/a/b.js",
    ),
    *(
        "runs/one/result.json",
        ".ipynb_checkpoints/x.ipynb",
        "a.ipynb_checkpoints/x",
        "lib/runs/two.txt",
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in EVERYTHING:
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "work"


def travels(folder: Path, *lines: str) -> set[str]:
    if lines:
        (folder / IGNORE_FILE).write_text("\n".join(lines) + "\n")
    return {path.relative_to(folder).as_posix() for path in script_files(folder)} - {IGNORE_FILE}


PLAIN = set(EVERYTHING[:7])


@pytest.mark.parametrize(
    ("lines", "stays", "comes"),
    [
        ((), set(), set()),
        (("# a comment", "", "*.log"), {"report.log", "kept.log"}, set()),
        (("*.log", "!kept.log"), {"report.log"}, set()),
        (("/data/",), {"data/rows.bin", "data/keep.txt"}, set()),
        (("data/",), {"data/rows.bin", "data/keep.txt", "notes/data/deep.bin"}, set()),
        (("data/*", "!data/keep.txt"), {"data/rows.bin"}, set()),
        (("**/*.bin",), {"data/rows.bin", "notes/data/deep.bin"}, set()),
        (
            ("data/", "!data/keep.txt"),
            {"data/rows.bin", "data/keep.txt", "notes/data/deep.bin"},
            set(),
        ),
        (("!runs/",), set(), {"runs/one/result.json", "lib/runs/two.txt"}),
        (("!/runs/",), set(), {"runs/one/result.json"}),
    ],
)
def test_the_ignore_file_means_what_a_gitignore_means(
    folder: Path, lines: tuple[str, ...], stays: set[str], comes: set[str]
) -> None:
    assert travels(folder, *lines) == PLAIN - stays | comes


def test_only_the_file_beside_the_script_counts_and_a_model_s_folder_has_none(folder: Path) -> None:
    (folder / "lib" / IGNORE_FILE).write_text("*\n")
    assert travels(folder) == PLAIN | {f"lib/{IGNORE_FILE}"}
    (folder / IGNORE_FILE).write_text("*\n")
    assert {path.relative_to(folder).as_posix() for path in files_of(folder)} >= PLAIN


def test_the_folder_of_a_model_travels_without_what_no_folder_sends(folder: Path) -> None:
    sent = {path.relative_to(folder).as_posix() for path in files_of(folder)}
    assert sent == PLAIN


def test_a_pattern_for_folders_leaves_files_and_a_link_is_left_out_by_its_own_name(
    folder: Path,
) -> None:
    (folder / "link.log").symlink_to("lib/model.py")
    (folder / "link.py").symlink_to("lib/model.py")
    assert travels(folder, "report.log/", "train.py/", "lib/model.py/") == PLAIN | {
        "link.log",
        "link.py",
    }
    assert travels(folder, "*.log") == PLAIN - {"report.log", "kept.log"} | {"link.py"}


def test_an_ignore_file_that_cannot_be_read_is_refused_and_one_of_git_is_skipped(
    folder: Path,
) -> None:
    (folder / ".gitignore").mkdir()
    assert travels(folder) == PLAIN
    (folder / IGNORE_FILE).mkdir()
    with pytest.raises(ConfigError, match=f"cannot read .*{IGNORE_FILE}"):
        travels(folder)


def test_a_folder_that_is_left_out_is_not_even_looked_into(folder: Path) -> None:
    (folder / "data" / "loop").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nowhere")
    assert travels(folder) == PLAIN, "links to folders and to nothing do not travel"


def test_a_cluster_s_directory_stays_wherever_it_lies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cluster.json", "keeper.log", "identity/key", "pods/store/a.zip.part"):
        (folder / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "c" / name).touch()
    (folder / "lib" / "cluster.json").touch()  # one of the user's own
    assert travels(folder) == {*PLAIN, "lib/cluster.json"}
    monkeypatch.setattr("workbench.jobs.script_folder.script_files", lambda at: [at / "vanished"])
    with pytest.raises(
        ConfigError,
        match=sentence("vanished from the script's folder while the folder was read", "vanished"),
    ):
        zip_script(folder / "train.py")


def test_the_same_files_give_the_same_zip(folder: Path) -> None:
    first = zip_script(folder / "train.py")
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert zip_script(folder / "train.py") == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert set(archive.namelist()) == PLAIN
        assert archive.read("lib/model.py") == b"lib/model.py"


def test_too_large_a_folder_names_its_largest_files_and_the_ignore_file(folder: Path) -> None:
    for name, mib in (
        ("big.bin", 150),
        ("data/second.bin", 60),
        (".venv/huge.so", 900),
        ("third.bin", 3),
    ):
        with (folder / name).open("wb") as file:
            file.truncate(mib << 20)  # a hole, which takes no room
    with pytest.raises(ConfigError) as refused:
        check_script(folder / "train.py")
    said = str(refused.value)
    assert "holds 213 MiB" in said
    assert (
        "The largest: big.bin (150.0 MiB), data/second.bin (60.0 MiB), third.bin (3.0 MiB), "
        in said
    )
    assert str(folder / IGNORE_FILE) in said
    assert "huge.so" not in said
    (folder / IGNORE_FILE).write_text("big.bin\n")
    check_script(folder / "train.py")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            b"*.log\n!\n",
            sentence("is not a pattern of a .gitignore", ".workbenchignore, line 2: '!'"),
        ),
        (
            b"*.py\n",
            sentence(
                "leaves out {}, the script itself; add a line !", ".workbenchignore", "train.py"
            ),
        ),
        (b"\xff\xfe\n", sentence("cannot read", ".workbenchignore")),
    ],
)
def test_an_ignore_file_that_cannot_be_meant_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path, lines: bytes, said: str
) -> None:
    (folder / IGNORE_FILE).write_bytes(lines)
    spec = RunSpec(cluster=ClusterSpec(pods=PodSpec()), job=Script(path=str(folder / "train.py")))
    with pytest.raises(ConfigError, match=said):
        prepare_run(spec, root=tmp_path / "run")
    assert not (tmp_path / "run").exists()


KEYS = (
    *(
        ".env",
        ".env.local",
        ".envrc",
        ".aws/credentials",
        ".ssh/id_rsa",
        "id_rsa",
        "id_ed25519",
        "key.pem",
        ".netrc",
    ),
    *(
        ".npmrc",
        ".pypirc",
        ".kube/config",
        "kubeconfig",
        ".docker/config.json",
        "credentials.json",
        "secrets.json",
    ),
    *(
        "service-account.json",
        ".huggingface/token",
        ".cache/huggingface/token",
        "token",
        ".terraform/terraform.tfstate",
    ),
    *(
        ".terraform/terraform.tfstate",
        "terraform.tfstate",
        ".bash_history",
        ".python_history",
        "wandb/run-1/a",
        "mlruns/0/a",
        "lib/deep/.env",
    ),
)


def test_files_that_hold_keys_by_their_name_stay_unless_they_are_named(folder: Path) -> None:
    for name in KEYS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("canary")
    assert travels(folder) == PLAIN
    left = left_out(folder)
    assert {".env", "key.pem", ".aws/", "lib/deep/.env", "wandb/"} <= set(left)
    assert not PLAIN & set(left)
    assert travels(folder, "!.env", "!/key.pem") == PLAIN | {".env", "lib/deep/.env", "key.pem"}


@pytest.mark.parametrize(
    ("where", "lines", "stays"),
    [
        ("", "*.log\nnotes/\n", {"report.log", "kept.log", "notes/data/deep.bin"}),
        ("", "*.log\n!kept.log\n", {"report.log"}),
        ("", "!\n\n/data\n", {"data/rows.bin", "data/keep.txt"}),
        ("lib", "model.py\n", {"lib/model.py"}),
        ("lib", "!.env\n*.none\n", set()),
        ("..", "work/*.log\nkeep.txt\n", {"report.log", "kept.log", "data/keep.txt"}),
        ("..", "/work/\n", set()),
        ("..", "train.py\n*.bin\n", {"data/rows.bin", "notes/data/deep.bin"}),
    ],
)
def test_what_version_control_leaves_out_stays_but_for_the_script(
    folder: Path, where: str, lines: str, stays: set[str]
) -> None:
    (folder / ".git").rename(folder.parent / ".git")
    (folder / "lib" / ".env").write_text("canary")
    (folder / where / ".gitignore").write_text(lines)
    with zipfile.ZipFile(io.BytesIO(zip_script(folder / "train.py"))) as archive:
        assert {
            name for name in archive.namelist() if not name.endswith(".gitignore")
        } == PLAIN - stays
    (folder / IGNORE_FILE).write_text("!*.log\n")
    assert {"report.log", "kept.log"} <= {path.name for path in script_files(folder)}, (
        "our own file has the last word"
    )


def test_links_that_lead_elsewhere_or_to_what_stays_do_not_travel(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("canary")
    (folder / ".env").write_text("canary")
    (folder / "out.txt").symlink_to(tmp_path / "outside")
    (folder / "up.txt").symlink_to("../outside")
    (folder / "env.txt").symlink_to(".env")
    (folder / "same.py").symlink_to("lib/model.py")
    assert travels(folder) == PLAIN | {"same.py"}
    assert {"out.txt", "up.txt", "env.txt", ".env"} == set(left_out(folder))
    with zipfile.ZipFile(io.BytesIO(zip_script(folder / "train.py"))) as archive:
        assert b"canary" not in b"".join(archive.read(name) for name in archive.namelist())
        assert archive.read("same.py") == b"lib/model.py"


@pytest.mark.parametrize(
    "args",
    [
        ["--token=hf_abcdefghijklmnopqrstuvwx"],
        ["--api-key", "a1b2c3d4e5f6"],
        ["postgres://me:hunter2@db/x"],
        ["x7-Qp22-moon"],
        ["--login", "me:x7-Qp22-moon"],
    ],
)
def test_an_argument_that_is_a_secret_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path, args: list[str]
) -> None:
    job = Script(path=str(folder / "train.py"), args=args, env={"MY_SETTING": "x7-Qp22-moon"})
    with pytest.raises(
        ConfigError, match=sentence("and `ps` on a pod shows arguments to every user there")
    ) as refused:
        prepare_run(RunSpec(cluster=ClusterSpec(pods=PodSpec()), job=job), root=tmp_path / "run")
    assert args[-1] not in str(refused.value)
    assert not (tmp_path / "run").exists()
    plain = [
        "--token=${MY_SETTING}",
        "--tokens",
        "1024",
        "--lr",
        "1e-3",
        "--model",
        "google-t5/t5-small",
        "--seed=12345678",
    ]
    prepare_run(
        RunSpec(cluster=ClusterSpec(pods=PodSpec()), job=job.replace(args=plain)),
        root=tmp_path / "run",
    )


def test_the_run_says_how_much_travels_and_what_stays(folder: Path, tmp_path: Path) -> None:
    (folder / ".env").write_text("canary")
    (folder / "out.txt").symlink_to("/etc/passwd")
    job = Script(path=str(folder / "train.py"))
    prepared = prepare_run(
        RunSpec(cluster=ClusterSpec(pods=PodSpec()), job=job), root=tmp_path / "run"
    )
    (folder / "train.py").unlink()
    assert (
        sent_inputs(prepared.spec.job, prepared.paths)
        == "the script's folder (7 files, 83 bytes), without .env, out.txt,"
    )
    with zipfile.ZipFile(prepared.paths.script) as archive:
        assert archive.read("train.py") == b"train.py", "as it was when it was submitted"


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_references_in_arguments_are_filled_in_within_the_rank(
    tmp_path: Path, safe_path: str
) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "print(sys.argv, __name__, __file__, sys.path[:2], [n for n in dir() if n[0] != '_'])\n"
    )
    job = Script(path=str(tmp_path / "train.py"), args=["--token=${TOKEN}", "${OTHER}"])
    env = {**os.environ, "TOKEN": "a $b\n", "OTHER": "not given"}
    env |= {"PYTHONSAFEPATH": safe_path, "PYTHONPATH": str(tmp_path / "mine")}
    assert job.command({})[0] == "train.py"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert job.replace(args=["--x=${%s}" % name]).command({})[0] == "-c"  # noqa: UP031
    assert job.replace(args=["${HOME}", "$RANK", "RANK"]).command({})[0] == "train.py"
    filled = job.command({"TOKEN": ""})
    assert filled[-2:] == ["--token=${TOKEN}", "${OTHER}"], "`ps` shows the names alone"
    # A script sees the same names and paths with and without references.
    plain = ["train.py", "--token=a $b\n", "${OTHER}"]
    printed = [
        subprocess.run(
            [sys.executable, "-u", *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for command in (filled, plain)
    ]
    assert printed[0] == printed[1].replace("${OTHER}", "not given")


def test_a_linked_script_imports_its_neighbours_as_in_a_terminal(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "real").mkdir(parents=True)
    (work / "real" / "train.py").write_text("import helper")
    (work / "train.py").symlink_to("real/train.py")
    spec = RunSpec(cluster=ClusterSpec(), job=Script(str(work / "train.py")))
    job = prepare_run(spec, root=tmp_path / "run").spec.job
    assert isinstance(job, Script)
    assert (job.command({}), job.root) == (["real/train.py"], work)


def test_a_file_whose_name_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "work" / "train.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    (script.parent / os.fsdecode(b"m\xfcll.txt")).write_text("x")
    with pytest.raises(
        ConfigError,
        match=sentence("in the script's folder", "m\\udcfcll.txt"),
    ):
        check_script(script)
    (script.parent / IGNORE_FILE).write_text("m*.txt\n")
    check_script(script)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a `src` layout, and a script that looks for the package above itself."""
    root = tmp_path / "repository"
    (root / "src" / "pkg").mkdir(parents=True)
    (root / "scripts").mkdir()
    (root / "src" / "pkg" / "__init__.py").touch()
    (root / "src" / "pkg" / "util.py").write_text("X = 7\n")
    (root / "src" / "pkg" / "train.py").write_text(
        "import os, sys\nfrom .util import X\nprint(X, __name__, sys.argv[1:], os.getcwd())\n"
    )
    (root / "scripts" / "train.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, str(Path(__file__).parent.parent / 'src'))\n"
        "from pkg.util import X\nprint(X, sys.argv[1:], Path.cwd())\n"
    )
    return root


def started(job: Script, folder: Path, environment: dict[str, str]) -> str:
    """What a job prints whose archive was unpacked into a folder, as a pod's agent starts it."""
    prepared = prepare_run(
        RunSpec(cluster=ClusterSpec(pods=PodSpec()), job=job), root=folder / "run"
    )
    with zipfile.ZipFile(prepared.paths.script) as archive:
        archive.extractall(folder / job.folder_name)
    stored = Script.from_dict(prepared.spec.job.to_dict())
    program = stored.program_on(PodView(package="", folder=str(folder / stored.folder_name)))
    argv = [sys.executable, "-u", *program.argv]
    return subprocess.run(
        argv,
        cwd=program.cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip()


@pytest.mark.parametrize("arg", ["a b", "${RANK}"])
def test_a_module_and_a_folder_above_the_script_travel(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arg: str
) -> None:
    env = {"RANK": "3"}
    shown = [arg.replace("${RANK}", "3")]
    there = tmp_path / "module"
    job = Script(module="pkg.train", folder=str(repository / "src"), args=[arg])
    assert started(job, there, env) == f"7 __main__ {shown} {there / 'src'}"
    there = tmp_path / "script"
    monkeypatch.chdir(repository / "scripts")
    job = script_job("train.py", folder="..", args=[arg])
    assert started(job, there, env) == f"7 {shown} {there / 'repository'}"
    assert (there / "repository" / "src" / "pkg" / "util.py").is_file()
    monkeypatch.chdir(repository / "src")
    there = tmp_path / "here"
    assert started(Script(module="pkg.train"), there, env).startswith("7 __main__ []")


@pytest.mark.parametrize("arg", ["a b", "${RANK}"])
def test_a_package_that_runs_and_a_name_like_an_option_start(tmp_path: Path, arg: str) -> None:
    folder = tmp_path / "own"
    (folder / "main").mkdir(parents=True)
    (folder / "main" / "__main__.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    (folder / "-x.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    shown = f"__main__ {[arg.replace('${RANK}', '3')]}"
    job = Script(module="main", folder=str(folder), args=[arg])
    assert Script.from_dict(job.to_dict()).path == job.path == f"{folder}/main/__main__.py"
    assert started(job, tmp_path / "module", {"RANK": "3"}) == shown
    script = Script(str(folder / "-x.py"), args=[arg])
    assert started(script, tmp_path / "script", {"RANK": "3"}) == shown


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.ipynb", b"{}", sentence("Write a script with `jupyter nbconvert --to script")),
        ("a.sh", b"echo", sentence("Give the Python file that the shell script starts")),
        (
            "latin.py",
            "print('größe')".encode("latin-1"),
            sentence("is no text that Python reads. Save the file as UTF-8"),
        ),
        (
            "utf16.py",
            "print(1)".encode("utf-16"),
            sentence("is no text that Python reads. Save the file as UTF-8"),
        ),
        (
            "packed.py",
            b"\x1f\x8b\x08\0",
            sentence("is no text that Python reads. Save the file as UTF-8"),
        ),
        ("nul.py", b"print(1)\0", sentence("is no text that Python reads. Save the file as UTF-8")),
        (
            "unknown.py",
            b"# coding: no-such\n",
            sentence("is no text that Python reads. Save the file as UTF-8"),
        ),
        ("folder.py", None, sentence("or a module")),
        ("none.py", ..., sentence("does not exist")),
        ("sft.yaml", b"lr: 3", sentence("is no Python file", "['sft.yaml']")),
        ("zero.json", b"{}", sentence("is no Python file")),
        (
            "saved.py",
            b'{"cells": [], "nbformat": 4}',
            sentence("is a notebook") + sentence("remove the lines with get_ipython"),
        ),
        ("latin-named.py", "# coding: latin-1\nprint('größe')".encode("latin-1"), ""),
        ("marked.py", b"\xef\xbb\xbfprint(1)", ""),
        ("train", b"#!/usr/bin/env python\nprint(1)", ""),
    ],
)
def test_what_python_cannot_read_as_a_program_is_refused_before_a_run(
    tmp_path: Path, name: str, content: object, said: str
) -> None:
    script = tmp_path / name
    if content is None:
        script.mkdir()
    elif isinstance(content, bytes):
        script.write_bytes(content)
    if not said:
        check_script(script)
        return
    with pytest.raises(ConfigError, match=said):
        check_script(script)


def test_a_module_keeps_its_folder_and_its_users_files(repository: Path) -> None:
    folder = str(repository / "src")
    job = Script(module="pkg.train", folder=folder)
    assert (job.path, job.inside) == (f"{folder}/pkg/train.py", "pkg/train.py")
    assert Script.from_dict(job.to_dict()).to_dict() == job.to_dict()
    there = 'File "/pod/runs/r1/script/src/pkg/util.py", line 1'
    assert job.in_users_files(there, "r1") == f'File "{folder}/pkg/util.py", line 1'
    whole = "No such file or directory: '/pod/runs/r1/script/src'"
    assert job.in_users_files(whole, "r1") == f"No such file or directory: '{folder}'"
    other = 'File "/pod/runs/r1/script/src-old/a.py"'
    assert job.in_users_files(other, "r1") == other
    other_folder = str(shutil.copytree(folder, repository / "else"))
    moved = job.replace(path=f"{other_folder}/pkg/train.py", folder=other_folder)
    assert (moved.path, moved.folder) == (f"{other_folder}/pkg/train.py", other_folder)
    assert "pkg/util.py" in {name for name, _ in job.views.local_files()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"module": "pkg/train.py"}, "not the name of a module"),
        ({"module": "pkg.train", "path": "other.py"}, "Give one of the two"),
        ({"module": "pkg.missing", "folder": "src"}, "has no file .*/src/pkg/missing.py. Give"),
        ({"path": "scripts/train.py", "folder": "src"}, "is not in the folder"),
        ({"path": "scripts/train.py", "folder": "none"}, "folder 'none' does not exist"),
    ],
)
def test_a_module_that_is_not_there_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], words: str
) -> None:
    monkeypatch.chdir(repository)
    with pytest.raises(ConfigError, match=words):
        Script(**options).views.check_early(gpus=0, ranks=1)


@pytest.mark.parametrize(
    "name", ["my repo", "v1.2", "größe", "json", "a'b", "$HOME", "-x", "..hidden", "workbench"]
)
def test_the_sent_folder_keeps_its_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "here" / name
    (own / "sub").mkdir(parents=True)
    (own / "train.py").write_text(
        "from pathlib import Path\nprint(Path(__file__).parent.name, Path.cwd().name)\n"
    )
    monkeypatch.chdir(own / "sub")
    for number, path in enumerate((str(own / "train.py"), "../train.py")):
        assert started(Script(path), tmp_path / f"{number}", {}) == f"{name} {name}"
    monkeypatch.chdir(own)
    assert started(script_job("train.py", folder="."), tmp_path / "2", {}) == f"{name} {name}"
    job = script_job("train.py")
    traceback = f'File "/pod/runs/r1/script/{name}/train.py", line 1'
    assert job.found_in(own).in_users_files(traceback, "r1") == (f'File "{own}/train.py", line 1')


def test_a_folder_without_a_name_has_one_on_the_pods() -> None:
    assert script_job("/train.py").folder_name == "script"
