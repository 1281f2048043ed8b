"""`Script`: any training script as a job. `Function`: one of the notebook, which travels as a script that calls it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field

from workbench.base import entries
from workbench.base.errors import ConfigError, suggests
from workbench.base.files import read_json, user_path, write_bytes
from workbench.base.package import fingerprint
from workbench.base.record import (
    Allowed,
    Choice,
    Count,
    Environment,
    PathText,
    Positive,
    Unit,
)
from workbench.base.words import short_list
from workbench.jobs.job import (
    FolderOutputs,
    Handover,
    HandoverRequest,
    Job,
    NewRun,
    PodView,
    Program,
    Stop,
    carried,
)
from workbench.jobs.launcher import Launcher
from workbench.jobs.script_folder import (
    check_args,
    check_outputs,
    digests_of,
    left_out,
    travelling,
    zip_script,
)

ARCHIVE = "inputs/script.zip"
"""A script with its folder, below the run directory."""
_LEFT_OUT = 100  # names kept of what did not travel

_REFERENCE = re.compile(r"\$\{(\w+)\}")
# Within the rank's own process: what `ps` shows are the references.
_FILL_IN = """\
import os, re, runpy, sys
sys.argv[:] = [re.sub(r"\\$\\{(\\w+)\\}", lambda m: os.environ.get(m[1], m[0]), arg) for arg in sys.argv[1:]]
sys.path[0] = os.getcwd()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def references(texts: Iterable[str]) -> list[str]:
    """Return the variables that texts refer to by `${NAME}`, each once."""
    return list(dict.fromkeys(name for text in texts for name in _REFERENCE.findall(text)))


class Script(Job):
    """Run a training script of the user's, unchanged, as one process per slot.

    The script finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.
    Its folder travels with it, at most 200 MiB. A file `.workbenchignore` there, in gitignore's syntax, names what
    stays here. What a `.gitignore` names, version control, environments, caches, `runs/`, links that lead elsewhere and
    files that hold keys by their name (`.env`, `*.pem`, `.aws/`, …) stay anyway, unless a line such as `!runs/` or
    `!.env` takes them back.
    """

    kind: ClassVar[str] = "script"
    recipe: ClassVar[str] = entries.REPEAT

    path: Annotated[PathText, Field(min_length=1), Allowed("the path of a Python file")]
    """The script, a Python file."""
    args: Annotated[Sequence[str], Allowed("a list of strings, one an argument")] = ()
    """Its arguments, each passed as it stands; `${NAME}` of a variable in `env` is filled in within the rank, where
    `ps` does not show it. One that looks like a secret is refused."""
    launcher: Annotated[str, Choice(Launcher)] = "ssh"
    """One of `Launcher`."""
    stall_timeout_s: Annotated[Positive | None, Unit("seconds")] = None
    """Seconds without output, CPU time and steps, or with a rank stopped by a signal, after which the run is ended as
    failed, with kind `stall`. Default None: it is told, and goes on."""
    stop_grace_s: Annotated[Positive, Unit("seconds")] = 60.0
    """Seconds from `run.stop()`, which has a Trainer end after a step and asks other ranks by a signal, to the kill of
    ranks that have not ended."""
    restarts: Annotated[Count, Unit("restarts")] = 0
    """How often it is started again, from its beginning, after it lost a pod, or had a rank killed from outside (not
    for its memory). A lost pod is replaced, a host that is gone left out. The script finds its own checkpoints, and the
    number of restarts so far in TORCHELASTIC_RESTART_COUNT, as under torchrun. Default 0: it fails."""
    env: Environment = Field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed or written down; `${NAME}` in one is filled in
    from the environment of whoever submits the job."""

    outputs: Annotated[Sequence[str], Allowed("a list of patterns as in a .gitignore")] = ()
    """What comes back from all pods, as patterns of a `.gitignore` (`*.pt`, `out/**`): new and changed files of the
    script's folder there, into `outputs/pod-1/…`. Rank 0's pod needs none: all that was written in its copy of the
    folder comes back, into `outputs/`."""
    outputs_limit_gib: Annotated[Positive, Unit("GiB")] = 20.0
    """What comes back at most, the smallest files first. What is more stays on its pod while the cluster is up, and
    `run.fetch()` brings it."""

    def __init__(self, path: object = None, /, **options: object) -> None:
        super().__init__(**({} if path is None else {"path": path}), **options)

    @property
    def word(self) -> str:
        return "".join(c for c in Path(self.path).stem if c.isalnum()) or "script"

    @property
    def stop(self) -> Stop:
        return Stop(by="signal", grace_s=self.stop_grace_s)

    @property
    def folder_outputs(self) -> FolderOutputs:
        return FolderOutputs(patterns=self.outputs, limit_gib=self.outputs_limit_gib)

    def moved(self, move: Callable[[object], object]) -> Self:
        return self.replace(path=move(self.path))

    def absolute(self) -> Self:
        return self.replace(path=str(user_path(self.path).absolute()))

    def prepare(self, run: NewRun) -> Self:
        check_args(self.args, run.environment)
        check_outputs(self.outputs)
        write_bytes(run.root / ARCHIVE, zip_script(Path(self.path)))
        return self

    def origin(self, root: Path) -> Mapping[str, object]:  # noqa: ARG002
        folder = Path(self.path).expanduser().parent
        return {
            "script": fingerprint(digests_of(folder)),
            "left_out": left_out(folder)[:_LEFT_OUT],
        }

    def archive_in(self, root: Path) -> Path:
        return root / ARCHIVE

    def travels(self, root: Path) -> str:
        left = read_json(root / "origin.json").get("left_out")
        stays = f", without {short_list(left)}," if isinstance(left, list) and left else ""
        return travelling((root / ARCHIVE).read_bytes()) + stays

    def program_on(self, pod: PodView) -> Program:
        theirs = pod.environment.get("PYTHONPATH", "")
        # The package comes last: `import workbench` finds it, and nothing of the job's is hidden.
        path = [f"{pod.package}/{entries.SCRIPT_SITE}", *([theirs] if theirs else []), pod.package]
        forced = {"PYTHONPATH": ":".join(path)}
        if self.restarts:
            forced["TORCHELASTIC_RESTART_COUNT"] = str(pod.restart)
        return Program(
            argv=self.command(pod.environment),
            cwd=pod.folder or str(Path(self.path).parent),
            forced=forced,
        )

    def command(self, environment: Mapping[str, str]) -> list[str]:
        """Return what follows `python -u` in the script's folder."""
        name = self.path.rpartition("/")[2]
        is_filled = any(variable in environment for variable in references(self.args))
        return [*(["-c", _FILL_IN] if is_filled else []), name, *self.args]

    def handed_over(self, request: HandoverRequest) -> Handover:
        name = Path(request.script or self.path).name
        put = "its folder as 'script'"
        if request.folder:
            asked = {**self.to_dict(), "path": f"{request.folder}script/{name}"}
            return Handover(job=asked, put=put)
        archive = self.archive_in(request.root)
        if request.script:
            packed = zip_script(Path(request.script).expanduser().absolute())
        elif archive.is_file():
            packed = carried(archive, request.root)
        else:
            raise ConfigError(
                f"{request.root} does not hold the script that it ran (a version before this one made it): name it "
                f"anew, run.manifest(…, script='FOLDER/{name}')"
            )
        return Handover(
            job={**self.to_dict(), "path": name},
            archive=packed,
            large="the script's folder",
            put=put,
        )

    def in_users_files(self, traceback: str, run_id: str) -> str:
        """Return a traceback that names the script's files where their user has them.

        Example:
            >>> text = 'File "/pod-0/runs/r1/script/lib/data.py", line 3'
            >>> Script("/home/me/train.py").in_users_files(text, "r1")
            'File "/home/me/lib/data.py", line 3'
        """
        script = Path(self.path)
        # With `${NAME}` in its arguments a script is run by its bare name.
        copy = rf'(?<=File ")([^"]*/{re.escape(run_id)}/script/|(?={re.escape(script.name)}"))'
        return re.sub(copy, lambda _: f"{script.parent}/", traceback)


@dataclass(frozen=True, slots=True)
class Function:
    """Run a function of the notebook as one process per slot, with `Cluster.submit`.

    It travels by value, with the functions and variables of the notebook that it uses; what it imports must be on the
    pods. It finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun, and
    starts in an empty folder, of which new files come back as those of a `Script`.

    Example:
        run = cluster.submit(Function(train, args=(3,), env={"NCCL_DEBUG": "INFO"}))
        run.wait().raise_for_status()
        run.returned
    """

    function: Callable[..., object]
    """What every rank calls."""
    args: Sequence[object] = ()
    """Its arguments by place."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Its arguments by name."""
    launcher: str = "ssh"
    """One of `Launcher`."""
    stall_timeout_s: float | None = None
    """As of a `Script`."""
    restarts: int = 0
    """As of a `Script`."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of every rank. Values are never printed or written down."""

    @property
    def name(self) -> str:
        """The function's own name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


Function.__init__ = suggests("Function")(Function.__init__)  # type: ignore[method-assign]
