"""Define `Job`, the interface of a kind of job to keeper, agents, run directories and clients.

A kind of job is a class. The class declares the four common options (`launcher`, `env`, `restarts`,
`stall_timeout_s`), the class variable `kind`, and the methods `prepare` and `program_on`. All other
members have a default. `Traits` has the constants of a kind, `Rules` has rules that depend on the
options, and `JobViews` (`jobs/views.py`) has the answers for tables, panels and benchmarks. The
registry (`jobs/registry.py`) finds the class by its kind.
"""

from __future__ import annotations

import glob
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from workbench.base import entries
from workbench.base.errors import ConfigError
from workbench.base.files import is_there
from workbench.base.files.gate import read_within
from workbench.base.record import Record
from workbench.jobs.launcher import LauncherName
from workbench.jobs.requirements.requirements import Requirements
from workbench.jobs.views import JobViews

Success = Literal["record", "exit code"]
"""Proof that a rank is done: the rank's own record `done.json`, or exit code 0."""

COMMON = ("launcher", "env", "restarts", "stall_timeout_s")
"""Options that every kind of job declares."""
OF_THE_RUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "WORKBENCH_RUN_DIR",
)
"""Variables of every rank that no `env` sets: the run decides the values."""
_GRACE_S = 60.0
_MOST_CARRIED = 512 << 20  # bytes of one file of a handover


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Way to stop the ranks of a job."""

    by: Literal["file", "signal"]
    """Way to ask the ranks.

    `file`: an empty file on rank 0's pod; the program looks for the file after every step.
    `signal`: SIGTERM or SIGINT to every rank, by what the program handles; a Trainer in the program
    is asked first.
    """
    grace_s: float | None = None
    """Seconds from a signal to the kill of ranks that have not ended. None, for a file: no kill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Rules for keeping and copying the checkpoints of a job."""

    most: int = 2
    """Number of checkpoints to keep, the newest."""
    brings: bool = False
    """Whether checkpoints are copied into the run directory; otherwise they stay on their pods."""
    meanwhile: bool = False
    """Whether checkpoints are copied while the job runs, not only at its end."""
    store: str = ""
    """Address in an object store that also gets the copied checkpoints. Empty: none."""
    folder: str = ""
    """Folder that all pods share, for checkpoints that are used in place. Empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOutputs:
    """Rules for copying back new and changed files of the folder in which ranks start."""

    patterns: Sequence[str]
    """Patterns of a `.gitignore` for files on all pods.

    On rank 0's pod every file is copied back.
    """
    limit_gib: float
    """Maximum size of the copied files in GiB. The smallest files are copied first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules for the ranks and the files of a job, by the job's options."""

    stop: Stop = Stop(by="signal", grace_s=_GRACE_S)
    """Way to stop the ranks. Default: a signal, and a kill after 60 seconds."""
    checkpoints: Checkpoints = Checkpoints()
    """Rules for keeping and copying checkpoints."""
    outputs: FolderOutputs | None = None
    """Rules for copying files back from the ranks' folder.

    None: only rank 0's `out/` is copied.
    """
    functions: Sequence[str] = ()
    """Names of notebook functions in the job.

    Their pods need the Python version of the notebook.
    """
    most_ranks: int | None = None
    """Maximum number of ranks, and of pods. None: no maximum."""

    def capped(self, count: int) -> int:
        """Return the number of pods or ranks for the job, of `count` available ones."""
        if self.most_ranks is None:
            return count
        return min(count, self.most_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Global batch of a job."""

    rows: int
    """Number of rows per optimizer step."""
    factors: Sequence[int] = ()
    """Factors of the rows: micro-batch, accumulation, ranks. Empty: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Constants of a kind of job."""

    success: Success = "exit code"
    """Proof that a rank is done."""
    events: frozenset[str] = frozenset()
    """Kinds of state events that the ranks may send.

    Other state events in the output are plain text.
    """
    records_flight: bool = False
    """Whether ranks write their last collectives into `flight.json` along with their stacks."""
    run_class: str = entries.RUN
    """`module:Class` of the handle of a run in a notebook: `Run` or a subclass."""
    result_class: str = entries.RESULT
    """`module:Class` of a run's result: `RunResult` or a subclass."""
    views_class: type[JobViews[Any]] = JobViews
    """Class that answers tables, panels and benchmarks: `JobViews` or a subclass."""
    recipe: str = ""
    """`module:function` that turns a result into a recipe without this project.

    Empty: no recipe.
    """
    start_phases: Sequence[str] = ()
    """Phases of a start in order, by the beginning of the keeper's message or of a `phase` event.

    The panel shows the share of the start that is done. Empty: the panel shows no share.
    """
    loss_unit: str = ""
    """Unit of the loss in `step` events. Empty: only the author of the program knows the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRun:
    """Run directory to prepare for a job."""

    root: Path
    """The run directory. Its folder `inputs/` exists, is empty and takes the files for the pods."""
    asked: Job
    """The job as the user wrote it, before open options were decided."""
    ranks: int
    """Number of ranks that will start."""
    gpus: int
    """Number of GPUs of each pod."""
    run_id: str = ""
    """Id of the run: the name of its folder on pods. Empty: a job that no pod runs."""
    memory_gib: float | None = None
    """Memory of each pod in GiB. None: unknown."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the pods and of the job with their values.

    May hold secrets; never written down.
    """
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Python versions of running pods, by pod. Empty: no pod is known yet."""
    cluster: Path | None = None
    """Directory of the cluster, whose pods may have checkpoints. None: a run without a keeper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededPackage:
    """Package that the ranks of a job import, beside the packages of every job."""

    name: str
    least: str
    """Oldest version."""
    reason: str
    """Option of the job that needs the package, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Outcome of `prepare`."""

    job: Job
    """The job in the form to store in `spec.json`, with absolute paths."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Fingerprints of the `data` and the `script` of the run, if present, for `origin.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """View of a pod for a job's program."""

    package: str
    """Folder or zip on the pod from which ranks import `workbench`."""
    folder: str | None
    """Folder on the pod with the unpacked archive of the job.

    None: the job's own paths are valid on the pod.
    """
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the pods and of the job with their values. May hold secrets."""
    restart: int = 0
    """Number of restarts of the run so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Command, folder and environment of every rank."""

    argv: Sequence[str]
    """Arguments of `python -u` on the pod."""
    entry: str | None = None
    """`module:function` of this package; a warm server calls the function in place of `argv`.

    None: every start is cold.
    """
    cwd: str | None = None
    """Folder to start in. None: the run's own folder on the pod."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Default variables of the ranks. Variables of the pods and of the job override them."""
    forced: Mapping[str, str] = field(default_factory=dict)
    """Forced variables of the ranks. They override the variables of the pods and of the job."""


class PodStore(Protocol):
    """File store of a pod: sends every content once and verifies the copy."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFetch:
    """Files of the internet that a single pod fetches for all pods of a run."""

    name: str
    """Name of the files for messages."""
    revision: str
    """Branch, tag or commit. All pods get the files of one commit."""
    script: str = field(repr=False)
    """Text of a Python program that fetches and places files, with its request on stdin."""
    request: Mapping[str, object] = field(default_factory=dict)
    """Fields of every request to the program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoverRequest:
    """Request to prepare a run for a system without a keeper, such as Kubeflow."""

    root: Path
    """The run directory, possibly of another person.

    Local files named in the directory are not read.
    """
    folder: str = ""
    """Folder on the other system for the large inputs, with a slash at its end.

    Empty: all inputs travel in the handover.
    """
    shared: bool = False
    """Whether the other system sees the files of this machine under the same paths."""
    script: str = ""
    """Local script to hand over in place of the run's own.

    Empty: the script in the run directory.
    """
    elastic: bool = False
    """Whether the number of ranks may change during the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """Files and settings of a job for the system that carries out the run."""

    job: Mapping[str, object]
    """JSON form of the job with paths of the other system."""
    inputs: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files in the handover, by the names in the job."""
    archive: bytes | None = field(default=None, repr=False)
    """Zip of the folder in which ranks start, in place of `inputs`.

    None: the job has no such folder.
    """
    resumes: bool = False
    """Whether restarted ranks continue from a checkpoint."""
    large: str = "the inputs"
    """Name of the large part of the handover, for messages."""
    put: str = "its files"
    """Name of the files to put into the folder if the handover is too large, for messages."""


def carried(file: Path, root: Path) -> bytes:
    """Read a file of a run directory for a handover.

    Raise ConfigError for a link out of the directory.
    """
    try:
        return read_within(file, root, _MOST_CARRIED)
    except OSError as error:
        raise ConfigError(f"{file} cannot be carried: {error.strerror}") from error


class Job(Record):
    """Base class of all jobs. The module lists the required members of a subclass."""

    label: ClassVar[str] = "job"
    kind: ClassVar[str]
    """Word for the kind in JSON, as registered."""

    # Subclasses define these fields, so that the options page keeps the order of the subclass.
    if TYPE_CHECKING:
        launcher: LauncherName
        """One of `Launcher`."""
        env: Mapping[str, str]
        """Environment variables of every rank. Values are never printed."""
        restarts: int
        """Number of restarts after a loss."""
        stall_timeout_s: float | None
        """Seconds of standstill until the run fails. None: a standstill is only reported."""

        def __init__(self, **options: object) -> None: ...

    traits: ClassVar[Traits] = Traits()
    """Constants of the kind."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        super().__pydantic_init_subclass__(**options)
        missing = [name for name in COMMON if name not in cls.model_fields]
        if missing:
            raise TypeError(f"the job class {cls.__name__} lacks the options {', '.join(missing)}")
        hidden = [name for name in cls.model_fields if hasattr(Job, name)]
        if hidden:
            raise TypeError(
                f"options of the job class {cls.__name__} hide members "
                f"of Job: {', '.join(hidden)}; rename the options"
            )

    # Facts.

    @property
    def rules(self) -> Rules:
        """Rules for the ranks and the files of the job."""
        return Rules()

    @property
    def views(self) -> JobViews[Self]:
        """Answers for tables, panels and benchmarks."""
        return self.traits.views_class(self)

    def batch_on(self, ranks: int) -> Batch | None:
        """Return the global batch on `ranks` ranks. None: unknown."""
        return None

    # Before the run.

    def found_in(self, folder: Path) -> Self:
        """Return the job with absolute paths of files that are in a folder; see `file_in`."""
        return self

    def chosen(self, *, gpus: int, ranks: int | None, apart: bool, looks: bool = True) -> Self:
        """Return the job with every open option decided.

        Args:
            gpus: Number of GPUs of each pod.
            ranks: Number of ranks. None: unknown.
            apart: Whether a network connects the pods.
            looks: Whether to open files that the job names. False for a job of another user.
        """
        return self

    def on_ranks(self, ranks: int, before: int) -> Self:
        """Return the job for `ranks` instead of `before` ranks, with almost the same batch."""
        return self

    @abstractmethod
    def prepare(self, run: NewRun) -> Prepared:
        """Write the inputs into the run directory. Relative paths of the job become absolute.

        Raises:
            ConfigError: The job cannot work, for the reason in the message. Nothing has started.
        """

    # On the pods.

    @property
    def needed(self) -> Sequence[NeededPackage]:
        """Packages that the pods must have before ranks start."""
        return ()

    def archive_in(self, root: Path) -> Path | None:
        """Return the zip of the ranks' folder in a run directory.

        Every pod unpacks the zip. None: no zip.
        """
        return None

    @property
    def folder_name(self) -> str:
        """Name of the folder on the pods into which the zip is unpacked. Empty: any name."""
        return ""

    def packages_in(self, root: Path) -> Requirements | None:
        """Return the packages of the ranks' environment, from a run directory.

        None: ranks start with the pod's own Python.
        """
        return None

    def files_for(self, pod: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
        """Send large inputs to a pod.

        Return small text files for the run's folder on the pod, by name.
        """
        return {}

    def fetch_for_pods(self) -> PodFetch | None:
        """Return the files that one of several pods fetches for all. None: no such files."""
        return None

    @abstractmethod
    def program_on(self, pod: PodView) -> Program:
        """Return the program of every rank on a pod."""

    # After a loss, and at the end.

    def resumed(
        self,
        root: Path,
        *,
        gpus: int,
        before: int,
        ranks: int,
        last_step: int | None,
        newest: object = None,
    ) -> tuple[int | None, int | None]:
        """Change the inputs of a run so that the run continues on `ranks` after a loss.

        `newest` is the newest valid checkpoint in a shared folder. None: the checkpoints are in the
        run directory, or the shared folder has none.

        Returns:
            The step of the checkpoint, and the global batch if changed. None for the step: the
            program finds its own checkpoints.

        Raises:
            ConfigError: The run cannot continue on `ranks`.
        """
        return None, None

    def restarted_from(self, root: Path, ranks: int) -> Mapping[int, Path]:
        """Choose a checkpoint of an earlier attempt.

        Return the folder of every rank's part, or an empty mapping.
        """
        return {}

    def in_users_files(self, words: str, run_id: str) -> str:
        """Return a message or traceback with the user's file names, not the copies' on pods."""
        return words

    # Without a keeper.

    def handed_over(self, request: HandoverRequest) -> Handover:
        """Return the files and settings for a system that carries out the run without a keeper.

        Raises:
            ConfigError: The job cannot run on the other system. The message has reason and remedy.
        """
        raise ConfigError(
            f"a job of kind {self.kind!r} cannot be handed over: the class has no handed_over(); "
            "submit it to a cluster instead"
        )


def file_in(folder: Path, value: object) -> object:
    """Return the absolute path of a file in a folder, or else the value; for a list, part by part.

    A pattern with `*` counts as a file if it matches files. The value may be absolute.
    """
    match value:
        case [*several]:
            return [file_in(folder, part) for part in several]
        case str() if is_there(folder / value):
            return str(folder / value)
        case str() if "*" in value and glob.glob(value, root_dir=folder):  # noqa: PTH207
            return str(folder / value)
    return value
