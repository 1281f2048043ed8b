"""Define `Script`, a job for any training script, and `Function`, a job for a notebook function."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field

from workbench.base import entries
from workbench.base.errors import ConfigError, RunError, shortened, suggests
from workbench.base.files import read_json, user_path, write_bytes, write_json
from workbench.base.json_values import as_str
from workbench.base.package import fingerprint
from workbench.base.record import (
    Allowed,
    Count,
    Environment,
    Exists,
    PathText,
    Positive,
    Unit,
)
from workbench.base.words import short_list
from workbench.jobs.job import (
    OF_THE_RUN,
    FolderOutputs,
    Handover,
    HandoverRequest,
    Job,
    NewRun,
    PodView,
    Prepared,
    Program,
    Rules,
    Stop,
    Traits,
    carried,
    file_in,
)
from workbench.jobs.launcher import LauncherName
from workbench.jobs.requirements.read import read_requirements
from workbench.jobs.requirements.requirements import Requirements
from workbench.jobs.script_folder import (
    check_args,
    check_outputs,
    check_script,
    digests_of,
    left_out,
    script_files,
    zip_script,
)
from workbench.jobs.views import JobViews

ARCHIVE = "inputs/script.zip"
"""Zip of the script's folder, relative to the run directory."""
_PACKAGES = "inputs/requirements.json"
_LEFT_OUT = 100  # names of files that were left out

_REFERENCE = re.compile(r"\$\{(\w+)\}")
_OF_RANKS = frozenset(
    (
        *OF_THE_RUN,
        *("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    )
)
"""Variables of every rank that arguments may name besides the variables of `env`."""
# The rank's own process fills in the values, so `ps` shows only the references.
_FILL_IN = """\
def start():
    import os, re, sys

    def fill(found):
        return os.environ.get(found[1], found[0])

    sys.argv[:] = [re.sub(r"\\$\\{(\\w+)\\}", fill, arg) for arg in sys.argv[1:]]
    path = os.path.abspath(sys.argv[0])
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(path)
    globals()["__file__"] = path
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec")

exec(globals().pop("start")())
"""
_FILL_IN_MODULE = """\
import os, re, runpy, sys
def fill(found):
    return os.environ.get(found[1], found[0])

sys.argv[:] = [re.sub(r"\\$\\{(\\w+)\\}", fill, arg) for arg in sys.argv[1:]]
if not sys.flags.safe_path:
    sys.path[0] = os.getcwd()
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def references(texts: Iterable[str]) -> list[str]:
    """Return the variables in `${NAME}` references of the texts, without duplicates."""
    names: dict[str, None] = {}
    for each in texts:
        names.update(dict.fromkeys(_REFERENCE.findall(each)))
    return list(names)


class ScriptViews(JobViews["Script"]):
    """Answers of a script for tables, panels and benchmarks."""

    @property
    def word(self) -> str:
        letters = [letter for letter in Path(self.job.path).stem if letter.isalnum()]
        return "".join(letters) or "script"

    def panel_facts(self, start: Mapping[str, object]) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        facts = [("script", self.job.path.rpartition("/")[2])]
        given = self.job.requirements
        if given:
            packages = Path(given).name if isinstance(given, str) else short_list(given)
            isolated = ", isolated" if self.job.isolated else ""
            facts.append(("environment", f"{packages}{isolated}"))
        return facts

    @classmethod
    def table_columns(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the cells of a script in tables: the file's name stands for the model."""
        return {
            "model": Path(as_str(options.get("path"))).name,
            "technique": as_str(options.get("kind")),
        }

    def grid_name(self, options: Mapping[str, object], *, alone: bool) -> str:  # noqa: ARG002
        return f"script {self.job.path}"

    def local_files(self) -> Iterable[tuple[str, Path]]:
        folder = self.job.root
        for path in script_files(folder):
            yield path.relative_to(folder).as_posix(), path

    def check_early(self, *, gpus: int, ranks: int) -> None:  # noqa: ARG002
        self.job.check_file()
        check_script(self.job.file, self.job.root)
        self.job.read_packages(self.job.env)


class Script(Job):
    """Run a user's training script, unchanged, with a process per slot.

    The script finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    as under torchrun. The script's folder is sent too, at most 200 MiB. A file `.workbenchignore`
    in the folder, in gitignore's syntax, lists files to leave out. By default, the folder is sent
    without the files in a `.gitignore`, version control, environments, caches and `runs/`. Links
    out of the folder and files with names of key files (`.env`, `*.pem`, `.aws/`, …) are left out
    too. A line such as `!runs/` or `!.env` includes the named files again.
    """

    kind: ClassVar[str] = "script"
    traits: ClassVar[Traits] = Traits(
        views_class=ScriptViews,
        recipe=entries.REPEAT_SCRIPT,
    )

    path: Annotated[PathText, Field(min_length=1), Exists(), Allowed("the path of a Python file")]
    """Path of the script, a Python file. With `module`, the path follows from the module."""
    module: Annotated[str, Allowed("the name of a module, such as 'pkg.train'")] = ""
    """Module to run in place of a file, as `python -m` does. Its name begins in `folder`."""
    folder: Annotated[
        PathText | None, Exists(), Allowed("the path of a folder above the script")
    ] = None
    """Folder that is sent to the pods, and in which the script starts.

    Default: the folder of the script; for a module, the current folder.
    """
    args: Annotated[Sequence[str], Allowed("a list of strings, one an argument")] = ()
    """Arguments of the script, passed unchanged.

    `${NAME}` of a variable in `env`, or of a rank's own variable such as `${RANK}`, is filled in
    within the rank, where `ps` does not show the value. An argument that looks like a secret is
    refused.
    """
    launcher: LauncherName = "ssh"
    """One of `LauncherName`."""
    stall_timeout_s: Annotated[Positive | None, Unit("seconds")] = None
    """Seconds without progress until the run fails with kind `stall`.

    Progress is output, CPU time or steps; a rank stopped by a signal also counts as a standstill.
    Default None: a standstill is reported and the run continues.
    """
    stop_grace_s: Annotated[Positive, Unit("seconds")] = 60.0
    """Seconds from `run.stop()` to the kill of ranks that have not ended.

    `run.stop()` ends a Trainer after a step and sends other ranks a signal.
    """
    restarts: Annotated[Count, Unit("restarts")] = 0
    """Number of restarts, from the script's beginning.

    The run restarts if a pod is lost or if a rank is killed from outside (not for its memory). A
    lost pod is replaced; a host that is gone is left out. The script finds its own checkpoints, and
    the number of restarts so far in TORCHELASTIC_RESTART_COUNT, as under torchrun. Default 0: the
    run fails.
    """
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank.

    Values are never printed or written down. `${NAME}` in a value is filled in from the environment
    of the user who submits the job.
    """

    requirements: Annotated[
        PathText | Sequence[str] | None,
        Exists(),
        Allowed("a list such as ['trl==1.16.0'], or the path of a requirements.txt or a uv.lock"),
    ] = None
    """Packages of an environment for the script: a list such as `["trl==1.16.0"]`, or a path.

    The path leads to a `requirements.txt`, a `pyproject.toml` or a `uv.lock`. Every set of packages
    has an environment in the cluster's folder on the pods, made once. `${NAME}` of a variable in
    `env` is filled in on the pods. Default None: the packages in the script's header
    (`# /// script`, PEP 723), or the pod's own packages without a header. `[]` ignores the header.
    """
    isolated: bool = False
    """Whether the environment sees none of the pod's packages, not even torch.

    Default False: the pod's packages are used, and only packages that the pod lacks or has in
    another version are installed.
    """

    outputs: Annotated[Sequence[str], Allowed("a list of patterns as in a .gitignore")] = ()
    """Files to copy back from all pods, as patterns of a `.gitignore` (`*.pt`, `out/**`).

    New and changed files of the script's folder are copied into `outputs/pod-1/…`. Rank 0's pod
    needs no pattern: all new and changed files in its copy of the folder are copied into
    `outputs/`.
    """
    outputs_limit_gib: Annotated[Positive, Unit("GiB")] = 20.0
    """Maximum size of the copied files in GiB, the smallest files first.

    Larger files stay on their pod while the cluster is up, and `run.fetch()` copies them.
    """

    def __init__(self, path: object = None, /, **options: object) -> None:
        given = {} if path is None else {"path": path}
        given.update(options)
        module = given.get("module")
        if module and isinstance(module, str):
            given.setdefault("folder", ".")
            given["path"] = _path_of(module, str(given["folder"] or "."), given.get("path"))
        super().__init__(**given)

    @property
    def root(self) -> Path:
        """Folder that is sent to the pods, absolute."""
        return _normal(self.folder) if self.folder else self.file.parent

    @property
    def file(self) -> Path:
        """The script, absolute."""
        return _normal(self.path) if self.folder else user_path(self.path).absolute()

    @property
    def inside(self) -> str:
        """Path of the script relative to the sent folder."""
        if not self.folder:
            return self.path.rpartition("/")[2]
        return os.path.relpath(self.path, self.folder)

    @property
    def folder_name(self) -> str:
        root = self.root.resolve() if self.root.name == ".." else self.root
        return root.name or "script"

    @property
    def rules(self) -> Rules:
        return Rules(
            stop=Stop(by="signal", grace_s=self.stop_grace_s),
            outputs=FolderOutputs(patterns=self.outputs, limit_gib=self.outputs_limit_gib),
        )

    def found_in(self, folder: Path) -> Self:
        own = file_in(folder, self.folder) if self.folder else None
        found = self.replace(path=file_in(folder, self.path), folder=own)
        if isinstance(self.requirements, str):
            found = found.replace(requirements=file_in(folder, self.requirements))
        return found

    def prepare(self, run: NewRun) -> Prepared:
        check_args(self.args, run.environment)
        check_outputs(self.outputs)
        self.check_file()
        path = self.file
        root = self.root
        folder = str(root) if self.folder else None
        real = path.resolve()
        # As Python does: a linked script imports its neighbours in the folder of the real file.
        if path.is_symlink() and not self.module and real.is_relative_to(root.resolve()):
            path = root / real.relative_to(root.resolve())
            folder = str(root)
        packages = self.read_packages(run.environment)
        if packages is not None:
            for pod, version in run.pythons.items():
                packages.check_python(version, pod)
        write_bytes(run.root / ARCHIVE, zip_script(path, root))
        job = self.replace(path=str(path), folder=folder)
        if isinstance(self.requirements, str):
            job = job.replace(requirements=str(user_path(self.requirements).absolute()))
        if packages is not None:
            write_json(run.root / _PACKAGES, packages.facts())
        origin = {
            "script": fingerprint(digests_of(root)),
            "left_out": left_out(root)[:_LEFT_OUT],
        }
        return Prepared(job=job, origin=origin)

    def _check_paths(self, names: Iterable[str]) -> None:
        self.check_file()
        super()._check_paths(names)

    def check_file(self) -> None:
        """Refuse a module without a file."""
        if self.module and not self.file.is_file():
            top = self.module.partition(".")[0]
            raise ConfigError(
                f"the module {self.module!r} has no file {self.file}. Give the folder above"
                f" {top!r} as folder, which is {str(self.root)!r} now, or correct the name"
            )

    def read_packages(self, environment: Mapping[str, str]) -> Requirements | None:
        """Read the requirements from the job, from their file or from the script's header.

        Raise ConfigError for requirements that no environment can fulfil.
        """
        script = user_path(self.path).absolute()
        return read_requirements(self.requirements, script, environment, isolated=self.isolated)

    def packages_in(self, root: Path) -> Requirements | None:
        facts = read_json(root / _PACKAGES)
        if not facts and self.requirements:
            raise RunError(f"{root / _PACKAGES} cannot be read; submit the job again")
        return Requirements.read(facts) if facts else None

    def archive_in(self, root: Path) -> Path:
        return root / ARCHIVE

    def program_on(self, pod: PodView) -> Program:
        # The package is last in the path, so it hides no module of the job.
        path = [
            f"{pod.package}/{entries.SCRIPT_SITE}",
            pod.environment.get("PYTHONPATH", ""),
            pod.package,
        ]
        forced = {"PYTHONPATH": ":".join(filter(None, path))}
        if self.restarts:
            forced["TORCHELASTIC_RESTART_COUNT"] = str(pod.restart)
        return Program(
            argv=self.command(pod.environment),
            cwd=pod.folder or str(self.root),
            forced=forced,
        )

    def command(self, environment: Mapping[str, str]) -> list[str]:
        """Return the arguments of `python -u` in the script's folder."""
        known = {*environment, *_OF_RANKS}
        filled = not known.isdisjoint(references(self.args))
        if self.module:
            start = ["-c", _FILL_IN_MODULE] if filled else ["-m"]
            return [*start, self.module, *self.args]
        start = ["-c", _FILL_IN] if filled else []
        # Python takes a name such as -x.py for an option.
        inside = f"./{self.inside}" if self.inside.startswith("-") else self.inside
        return [*start, inside, *self.args]

    def handed_over(self, request: HandoverRequest) -> Handover:
        name = self.inside
        if request.script and not self.folder:
            name = Path(request.script).name
        kept = self.folder_name
        put = f"its folder as 'script/{kept}'"
        # The script's folder is on the claim already.
        if request.folder:
            there = f"{request.folder}script/{kept}"
            asked = {**self.to_dict(), "path": f"{there}/{name}"}
            if self.folder:
                asked["folder"] = there
            return Handover(job=asked, put=put)
        # Otherwise the manifest carries the script: the user's, or the copy in the run directory.
        packages = self.packages_in(request.root)
        if packages is not None and packages.installs:
            raise ConfigError(
                f"the run has an environment with {packages.words}, which no other system makes. "
                "Build an image with the packages, and hand over a run with requirements=[]"
            )
        archive = self.archive_in(request.root)
        if request.script:
            script = Path(request.script).expanduser().absolute()
            above = Path(name).parts
            packed = zip_script(script, script.parents[len(above) - 1])
        elif archive.is_file():
            packed = carried(archive, request.root)
        else:
            raise ConfigError(
                f"{request.root} does not hold the script of the run. "
                f"Give the script: run.manifest(…, script='FOLDER/{name}')"
            )
        return Handover(
            job={
                **self.to_dict(),
                "path": f"{kept}/{name}",
                "folder": kept if self.folder else None,
            },
            archive=packed,
            large="the script's folder",
            put=put,
        )

    def in_users_files(self, words: str, run_id: str) -> str:
        """Return a message or traceback with the user's paths of the script's files.

        Example:
            >>> text = 'File "/pod-0/runs/r1/script/me/lib/data.py", line 3'
            >>> job = Script.from_dict({"kind": "script", "path": "/home/me/train.py"})
            >>> job.in_users_files(text, "r1")
            'File "/home/me/lib/data.py", line 3'
        """
        root = self.folder or Path(self.path).parent
        there = re.escape(f"/{run_id}/script/{self.folder_name}")
        copy = rf"(?<=[\"'(])/[^\"'\n]*{there}(?=[/\"')])"
        return re.sub(copy, lambda _: str(root), words)


def _normal(path: str) -> Path:
    """Return a path as absolute, and without `..`, so that a file is seen to be below a folder."""
    return Path(os.path.normpath(user_path(path).absolute()))


def _path_of(module: str, folder: str, given: object) -> str:
    """Return the path of a module's file below a folder. Refuse a path of another file."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"Script.module is {module!r}, not the name of a module. Write a name such as "
            "'pkg.train'; the folder of pkg is the option folder"
        )
    beside = module.replace(".", "/")
    names = (f"{beside}.py", f"{beside}/__main__.py")  # a module, or a package that runs
    chosen = names[0]
    if given is not None:
        chosen = next((name for name in names if str(given).endswith(name)), "")
    elif not _normal(f"{folder}/{names[0]}").is_file():
        chosen = names[_normal(f"{folder}/{names[1]}").is_file()]
    if not chosen:
        raise ConfigError(
            f"Script.path is {str(given)!r} and Script.module is {module!r}. Give one of the two"
        )
    return os.path.join(folder, chosen)  # noqa: PTH118  # a text, as the user wrote it


@dataclass(frozen=True, slots=True)
class Function:
    """Run a function of the notebook with a process per slot, with `Cluster.submit`.

    The function is sent by value, with the notebook's functions and variables in use. Imported
    packages must be installed on the pods. The function finds RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT in its environment, as under torchrun. It starts in an empty
    folder, and new files are copied back as for a `Script`.

    Example:
        run = cluster.submit(Function(train, args=(3,), env={"NCCL_DEBUG": "INFO"}))
        run.wait().raise_for_status()
        run.returned
    """

    function: Callable[..., object]
    """Function that every rank calls."""
    args: Sequence[object] = ()
    """Positional arguments."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments."""
    launcher: LauncherName = "ssh"
    """One of `LauncherName`."""
    stall_timeout_s: float | None = None
    """Same as the option of `Script`."""
    restarts: int = 0
    """Same as the option of `Script`."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed or written down."""
    requirements: str | Sequence[str] | None = None
    """Same as the option of `Script`. The environment has the pods' Python."""

    def __repr__(self) -> str:
        return (
            f"Function({self.name}, args={shortened(self.args)}, kwargs={shortened(self.kwargs)})"
        )

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


Function.__init__ = suggests("Function")(Function.__init__)  # type: ignore[method-assign]
