"""`Job`: everything that keeper, agents, run directories and clients know of what they carry.

A kind of job is one class. It declares the four options that every job has (`launcher`, `env`, `restarts`,
`stall_timeout_s`), the class variables `kind` and `success`, and the verbs `prepare` and `program_on`. All other
members have a default. The registry (`jobs/registry.py`) finds the class by its kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from workbench.base import entries
from workbench.base.errors import ConfigError
from workbench.base.files import read_bytes
from workbench.base.record import Record

Success = Literal["record", "exit code"]
"""How a rank proves that it is done: by a record `done.json` that it writes itself, or by exit code 0."""

COMMON = ("launcher", "env", "restarts", "stall_timeout_s")
"""Options that every kind of job declares."""
_GRACE_S = 60.0
_MOST_CARRIED = 512 << 20  # bytes of one file of a handover that are looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """How the ranks of a job are asked to stop."""

    by: Literal["file", "signal"]
    """`file`: an empty file on rank 0's pod, which the program looks for after each step. `signal`: SIGTERM or SIGINT
    to every rank, whichever the program handles; a Trainer within it is asked first."""
    grace_s: float | None = None
    """Seconds from a signal to the kill of ranks that have not ended. None for a file: nothing is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Which checkpoints of a job are kept, and where."""

    most: int = 2
    """Number of checkpoints to keep, the newest."""
    brings: bool = False
    """Whether checkpoints are copied into the run directory; otherwise they stay on their pods."""
    meanwhile: bool = False
    """Whether that is done while the job runs, not only at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOutputs:
    """Which new and changed files of the folder that ranks start in are copied back."""

    patterns: Sequence[str]
    """Patterns of a `.gitignore` that name files on all pods. On rank 0's pod every file is copied back."""
    limit_gib: float
    """Size of what is copied back at most, the smallest files first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRun:
    """A run directory that a job prepares."""

    root: Path
    """The run directory. What travels to the pods lies in `inputs/` below it, which exists and is empty."""
    asked: Job
    """The job as the user gave it, before open options were decided."""
    ranks: int
    """Number of ranks that will start."""
    gpus: int
    """Number of GPUs of each pod."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the pods and of the job with their values. May hold secrets: never written down."""
    ask_pods: Callable[..., Any] | None = None
    """Returns the checkpoint of another run that pods of this cluster hold; None where there is no cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """A pod as a job's program sees it."""

    package: str
    """Folder or zip on the pod that `import workbench` is served from."""
    folder: str | None
    """Folder on the pod that the job's archive was unpacked into. None: the job's own paths are valid there."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the pods and of the job with their values. May hold secrets."""
    restart: int = 0
    """Number of restarts of the run so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What each rank executes."""

    argv: Sequence[str]
    """Arguments of `python -u` on the pod."""
    entry: str | None = None
    """`module:function` of this package that a warm server calls in place of `argv`. None: every start is cold."""
    cwd: str | None = None
    """Folder to start in. None: the run's own folder on the pod."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks that those of the pods and of the job override."""
    forced: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks that override those of the pods and of the job."""


class PodStore(Protocol):
    """The files of one pod, as far as a job sends some itself. Each content is sent once, and verified."""

    store: PurePosixPath
    """Folder on the pod for content that several runs may use."""

    @property
    def name(self) -> str:
        """Name of the pod, for folders in a store that several pods share."""

    def sees(self, path: Path) -> bool:
        """Return whether the pod sees a path of this machine under the same name."""

    def put(self, data: bytes, suffix: str = "") -> str:
        """Send bytes into the store and return their path on the pod."""

    def put_once(self, local: Path, digest: str) -> str:
        """Send a file with this SHA-256 into the store and return its path on the pod."""

    def run(self, argv: Sequence[str]) -> str:
        """Run a command on the pod and return its standard output."""


class FirstPod(Protocol):
    """The line to the agent of rank 0's pod."""

    def call(self, op: str, **fields: Any) -> Mapping[str, Any]:
        """Send the agent a request and return its reply; a WorkbenchError says why there is none."""


class Companion(Protocol):
    """Work that is done beside a run. It can fail no run."""

    def start(self) -> None:
        """Begin, in a thread of its own."""

    def wait(self, seconds: float) -> None:
        """Wait for the end of the work, at most that long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoverRequest:
    """A run that another system is to carry out without a keeper, such as Kubeflow."""

    root: Path
    """The run directory. It may be another person's: files of this machine that it names are not read."""
    folder: str = ""
    """Folder there, with a slash at its end, that holds the large inputs. Empty: all inputs travel in the handover."""
    script: str = ""
    """A file of this machine to hand over in place of the one in the run directory. Empty: that one."""
    elastic: bool = False
    """Whether the number of ranks may change while it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What of a job travels to the system that carries it out, and what that system may do."""

    job: Mapping[str, object]
    """JSON form of the job as it is valid there."""
    inputs: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files that travel, by the names that the job uses."""
    archive: bytes | None = field(default=None, repr=False)
    """A zip of the folder that ranks start in; it takes the place of `inputs`. None: there is no such folder."""
    resumes: bool = False
    """Whether ranks that start again continue from a checkpoint."""
    large: str = "the inputs"
    """What of it is large, in words."""
    put: str = "its files"
    """What belongs into a folder there where it is too large to travel, in words."""


def carried(file: Path, root: Path) -> bytes:
    """Read a file of a run directory that is handed over; a link that leads out of the directory is refused."""
    try:
        return read_bytes(file, within=root, limit=_MOST_CARRIED)
    except OSError as error:
        raise ConfigError(f"{file} cannot be carried: {error.strerror}") from error


class Job(Record):
    """What runs on the pods. Subclasses are the kinds of jobs; see the module for what a kind must declare."""

    label: ClassVar[str] = "job"
    kind: ClassVar[str]
    """Word for the kind in JSON, as registered."""

    if (
        TYPE_CHECKING
    ):  # fields of the subclass, so that their order in the options page is the subclass's own
        launcher: str
        """One of `Launcher`."""
        env: Mapping[str, str]
        """Environment variables of every rank. Values are never printed."""
        restarts: int
        """How often the run starts again after a loss."""
        stall_timeout_s: float | None
        """Seconds of standstill after which the run fails. None: the standstill is only reported."""

        def __init__(self, **options: object) -> None: ...

    success: ClassVar[Success] = "exit code"
    events: ClassVar[frozenset[str]] = frozenset()
    """Kinds of state events that its ranks may send. Events of these kinds from any other job are only text."""
    records_flight: ClassVar[bool] = False
    """Whether its ranks write their last collectives into `flight.json` when their stacks are asked for."""
    run_class: ClassVar[str] = entries.RUN
    """`module:Class` of the handle that a notebook gets for a run: `Run` or a class below it."""
    result_class: ClassVar[str] = entries.RESULT
    """`module:Class` of a run's result: `RunResult` or a class below it."""
    recipe: ClassVar[str] = ""
    """`module:function` that returns, for a result, how to repeat the run without this project. Empty: no recipe."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        super().__pydantic_init_subclass__(**options)
        if missing := [name for name in COMMON if name not in cls.model_fields]:
            raise TypeError(f"the job class {cls.__name__} lacks the options {', '.join(missing)}")
        if hidden := [name for name in cls.model_fields if hasattr(Job, name)]:
            raise TypeError(
                f"options of the job class {cls.__name__} hide members of Job: {', '.join(hidden)}; "
                "rename the options"
            )

    # Facts.

    @property
    def word(self) -> str:
        """What runs, as a word for a file name."""
        return self.kind

    @property
    def facts(self) -> Mapping[str, object]:
        """What a result says of the job: at least technique, model and launcher."""
        return {"technique": self.kind, "model": "", "launcher": self.launcher}

    @property
    def functions(self) -> Sequence[str]:
        """Names of the notebook's functions that travel with it: pods need the notebook's version of Python."""
        return ()

    @property
    def stop(self) -> Stop:
        """How its ranks are asked to stop."""
        return Stop(by="signal", grace_s=_GRACE_S)

    @property
    def keeps(self) -> Checkpoints:
        """Which checkpoints are kept, and where."""
        return Checkpoints()

    @property
    def folder_outputs(self) -> FolderOutputs | None:
        """What is copied back of the folder that ranks start in. None: only what rank 0 puts into `out/`."""
        return None

    # Numbers.

    def pods_wanted(self, count: int) -> int:
        """Return the number of pods that it takes of so many."""
        return count

    def ranks(self, slots: int) -> int:
        """Return the number of ranks that start on so many slots."""
        return slots

    def global_batch(self, ranks: int) -> int | None:
        """Return the rows that one optimizer step learns from, on so many ranks. None: unknown."""
        return None

    def batch_factors(self, ranks: int) -> Sequence[int]:
        """Return the factors of the global batch, such as micro-batch, accumulation and ranks; empty if unknown."""
        return ()

    # Before the run.

    def moved(self, move: Callable[[object], object]) -> Self:
        """Return the job with `move` done to every option that may be a path."""
        return self

    def absolute(self) -> Self:
        """Return the job with every path of this machine made absolute."""
        return self

    def chosen(self, *, gpus: int, ranks: int | None, apart: bool) -> Self:
        """Return the job with every open option decided; `apart`: a network lies between its pods."""
        return self

    def on_ranks(self, ranks: int, before: int) -> Self:
        """Return the job for another number of ranks than `before`, with the global batch as near as possible."""
        return self

    @abstractmethod
    def prepare(self, run: NewRun) -> Job:
        """Write what travels into the run directory; return the job as it is written down.

        Raises:
            ConfigError: The job cannot work; the message says why. Nothing has started.
        """

    def origin(self, root: Path) -> Mapping[str, object]:
        """Return fingerprints of the `data` and the `script` of a prepared run, where it has them."""
        return {}

    # On the pods.

    def archive_in(self, root: Path) -> Path | None:
        """Return the zip in a run directory that each pod unpacks into the folder for ranks; None for no zip."""
        return None

    def travels(self, root: Path) -> str:
        """Return what of a run directory is sent to the pods, in words."""
        return "inputs"

    def files_for(self, pod: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
        """Send large inputs to a pod; return small text files for the run's folder there, by name."""
        return {}

    @abstractmethod
    def program_on(self, pod: PodView) -> Program:
        """Return what each rank executes."""

    def companion(self, pod: FirstPod, run_id: str, root: Path) -> Companion | None:
        """Return work that is done beside the run, which begins now; None for no such work."""
        return None

    # After a loss, and at the end.

    def resumed(
        self,
        root: Path,
        *,
        gpus: int,
        before: int,
        ranks: int,
        last_step: int | None,
    ) -> tuple[int | None, int | None]:
        """Change the inputs of a run of `before` ranks so that it continues on `ranks` after a loss.

        Returns:
            The step it continues from, and the new global batch where that changed. None for the step: the program
            finds its own checkpoints.

        Raises:
            ConfigError: It cannot continue like that.
        """
        return None, None

    def restarted_from(self, root: Path, ranks: int) -> Mapping[int, Path]:
        """Choose a checkpoint of an earlier attempt in a run directory; return the part of each rank, or nothing."""
        return {}

    def in_users_files(self, traceback: str, run_id: str) -> str:
        """Return a rank's traceback with the files of the user in place of their copies on pods."""
        return traceback

    # Without a keeper.

    def handed_over(self, request: HandoverRequest) -> Handover:
        """Return what travels to a system that carries out the run without a keeper.

        Raises:
            ConfigError: The job cannot run there; the message says why and what to do.
        """
        raise ConfigError(
            f"a job of kind {self.kind!r} cannot be handed over: its class has no handed_over(); "
            "submit it to a cluster instead"
        )
