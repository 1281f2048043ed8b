"""`SlurmPods`: one batch job with a node for every pod, or a step of the job around the notebook.

A node's step reads the pod's configuration from a private file in the cluster's directory. The
nodes share the directory with the notebook's machine.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr

from workbench.base.child import HOME, ended_within
from workbench.base.errors import (
    BackendError,
    ConfigError,
    PodError,
    PodTimeout,
    WorkbenchError,
)
from workbench.base.files import records, write_bytes, write_text
from workbench.base.json_values import get_object
from workbench.base.package import package_zip
from workbench.base.process import POD_MARK
from workbench.base.record import Allowed, Positive, Text, Unit
from workbench.base.words import pluralize
from workbench.pods.bootstrap.guardian import WorkerConfig
from workbench.pods.bootstrap.process import tail_of
from workbench.pods.notes import note_of, read_note, write_note
from workbench.pods.place import Place, Port, SetupLines
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.rendezvous.listener import Rendezvous
from workbench.pods.route import own_address_to
from workbench.pods.slurm import allocation, commands, job
from workbench.pods.slurm.allocation import Allocation
from workbench.pods.slurm.commands import Job
from workbench.pods.slurm.container import Container, Runner, runner_here
from workbench.pods.slurm.gres import cores_to_ask
from workbench.pods.slurm.notice import leaving_file
from workbench.pods.slurm.options import check_options, check_root
from workbench.pods.ssh.identity import check_key_line

logger = logging.getLogger(__name__)

JOBS = "slurm.json"
"""Name of the note on the jobs: ids of the jobs by name, and names of the pods' jobs."""
_FIRST_LOOKS_S = 0.5
_LOOK_S = 5.0  # between questions to Slurm's controller
_REPORT_S = 120.0  # for a pod of a running job; the time in the queue does not count
_END_S = 10.0
_COMPLETES_S = 60.0  # for the pods' checkpoints, and Slurm's KillWait of 30 s
_DELAY_S = 121.0  # Slurm delays a requeued job until the credential of its first start expires
_EXCLUDE = ("--exclude=", "--exclud=")
"""Option of sbatch, and its only abbreviation that is not one of --exclusive too."""
_BESIDES_S = 35.0  # of the notice: until a pod has read the notice, and until it has ended
NoticeTime = Annotated[
    int, Field(ge=60, le=65535), Unit("s"), Allowed("a whole number from 60 to 65535")
]
_LINES_SHOWN = 10
_OF_NEW_JOB = ("partition", "time", "account", "arguments", "notice_s", "requeue")
"""Options that a job around the notebook has got from its own submit."""
_HOPELESS = frozenset(
    [
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
    ]
)
"""Slurm's reasons for a pending job without hope."""


class SlurmPods(Place):
    """Nodes of a Slurm cluster as pods: one batch job with a node for every pod.

    A notebook inside a Slurm job has its pods on the nodes of the same job.
    """

    model_config = ConfigDict(populate_by_name=True)
    label: ClassVar[str] = "SlurmPods"
    kind: ClassVar[str] = "slurm"

    partition: Text | None = None
    """Partition of the job. Default: Slurm's own default."""
    time: Text | None = None
    """Time limit of the job in Slurm's form: `8:00:00` or another. Default: the partition's."""
    account: Text | None = None
    """Account of the job. Default: Slurm's own default."""
    gpu_type: Text | None = None
    """Type of the GPUs in Slurm's configuration, for example `a100`. Default: any type."""
    arguments: Annotated[Sequence[Text], AfterValidator(check_options)] = Field(
        default=(), alias="options"
    )
    """More options of `sbatch` in the long form: `--qos=high`, `--constraint=ib` and others."""
    setup: SetupLines = ()
    """Shell commands that run on every node before the pod starts: `module load cuda` and others.
    The ranks have the variables that the commands set, except `PYTHONPATH` and `PYTHONHOME`."""
    notice_s: NoticeTime = 60
    """Time between the notice of the time limit and the limit, in seconds. The ranks have 35 s less
    for a checkpoint. Default 60."""
    requeue: bool = False
    """Whether Slurm queues a preempted job again, under the same id. A run with `restarts` waits
    for the job. Default: no; `restarts` submit another job."""
    new_job: bool = False
    """Whether a notebook inside a Slurm job submits another job for its pods. Default: no; the pods
    are steps of the job around the notebook."""
    port: Port = 2222
    """Port of the nodes' SSH daemons. If the port is taken, a free one is used. Default 2222."""
    root: Annotated[str, AfterValidator(check_root)] = "/tmp"
    """Folder on the nodes for the pods' own folders, not shared by the nodes. Default `/tmp`."""
    connect_timeout_s: Annotated[Positive, Unit("s")] = 5
    """Time limit for a new connection to a node, in seconds. Default 5."""

    _ids: dict[str, str] = PrivateAttr(default_factory=dict)
    """Slurm's ids by the jobs' names; empty until Slurm has accepted the job."""
    _job_of: dict[str, str] = PrivateAttr(default_factory=dict)
    """Names of the pods' jobs."""
    _around: str = ""
    """Id of the job around the notebook, if the pods are steps of the job."""
    _sruns: list[subprocess.Popen[bytes]] = PrivateAttr(default_factory=list)
    _pods: list[Pod] = PrivateAttr(default_factory=list)
    _folder: Path = PrivateAttr(default=Path())
    _launched: set[str] = PrivateAttr(default_factory=set)
    _files: list[Path] = PrivateAttr(default_factory=list)
    _looked_s: float = 0.0
    _stopped: bool = False
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    def has_queue(self) -> bool:
        """A job waits in Slurm's queue; the job around a notebook runs already."""
        return self.new_job or not allocation.around()

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> list[Pod]:
        """Submit one job and wait until every node's pod has reported; see `Place.launch`."""
        if self._ids:
            raise BackendError("a job with the pods is submitted already; stop the pods first")
        if count < 1:
            raise ConfigError(f"count is {count!r}; a cluster has at least one pod")
        self._check(spec)
        self._around = "" if self.new_job else allocation.around()
        if self._around:
            self._check_around(spec, count)
        check_key_line(context.public_key)
        self._stopped = False
        self._folder = context.directory.absolute() / "pods"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._container_of(spec)  # refuses before the job
        names = [f"pod-{i}" for i in range(count)]
        root = self.root.rstrip("/")
        own = f"{root}/workbench-{context.cluster_id}-{secrets.token_hex(8)}"
        try:
            self._pods = self._launch_job(names, own, spec, context)
            return list(self._pods)
        except BaseException:
            with context.reporting_unstopped():
                self.stop()
            raise

    def _check(self, spec: PodSpec) -> None:
        if self.gpu_type is not None and not spec.gpus:
            raise ConfigError(
                f"SlurmPods.gpu_type is {self.gpu_type!r}, and PodSpec.gpus is 0. Give"
                " PodSpec(gpus=…), or leave gpu_type out"
            )
        by_core = [word for word in self.arguments if word.startswith("--mem-per-c")]
        if by_core and spec.memory_gib is not None:
            raise ConfigError(
                f"SlurmPods options has {by_core[0]!r}, and PodSpec.memory_gib is"
                f" {spec.memory_gib:g}: sbatch takes a single amount of memory. Leave"
                " PodSpec.memory_gib or the option out"
            )

    def _check_around(self, spec: PodSpec, count: int) -> None:
        """Refuse options of a new job, and pods without room in the job around the notebook."""
        given = [name for name in _OF_NEW_JOB if name in self.model_fields_set]
        if given:
            option = "options" if given[0] == "arguments" else given[0]
            raise ConfigError(
                f"SlurmPods.{option} is for a new job, and this notebook is inside the Slurm job"
                f" {self._around}, where the pods run. Leave {option} out, or submit a job for the"
                " pods: SlurmPods(new_job=True, …)"
            )
        there = allocation.read(self._around, self.gpu_type or "")
        there.check(spec, count, self._cores_in(there, spec))

    def _cores_in(self, there: Allocation, spec: PodSpec) -> int:
        return math.ceil(cores_to_ask(spec, [(there.cores, there.gpus)]))

    def _launch_job(
        self,
        names: Sequence[str],
        own: str,
        spec: PodSpec,
        context: LaunchContext,
        taken: Sequence[str] = (),
        again: str = "",
    ) -> list[Pod]:
        """Start the pods of a new job, or of the job `again` that Slurm has queued again."""
        name = again or f"workbench-{context.cluster_id}-{secrets.token_hex(4)}"
        timeout_s = context.timeout_s + (_DELAY_S if again else 0)
        with Rendezvous(names, host=self._own_address()) as rendezvous:
            # Every node's worker reads its configuration from a file in the shared folder.
            for pod in names:
                root = f"{own}/{pod}"
                config = WorkerConfig(
                    name=pod,
                    address="",
                    port=self.port,
                    slots=spec.slots,
                    root=root,
                    log=str(self._log(pod)),
                    public_key=context.public_key,
                    environment={POD_MARK: root},
                    lease_s=context.lease_s,
                    timeout_s=min(context.timeout_s, _REPORT_S),
                    rendezvous=(rendezvous.host, rendezvous.port),
                    token=rendezvous.token.hex(),
                    allowed_from=rendezvous.host,
                    leave_s=self.notice_s - _BESIDES_S,
                )
                file = job.config_of(self._folder, pod, name)
                self._files.append(file)
                write_text(file, config.to_line().decode())
            # A queued job starts the workers of its files again, so only a new job is submitted.
            if again:
                number = self._ids[again]
                context.report(f"Slurm queues job {number} again")
            else:
                number = self._submit(name, names, spec, context, taken)
                nodes = pluralize(len(names), "node")
                context.report(f"asked Slurm for {nodes}: {commands.named(number)}")
            watch = _StartWatch(self, number, names, context)
            try:
                came = rendezvous.wait(
                    timeout_s,
                    watch=watch.look,
                    status_of=watch.status_of,
                    report=context.report,
                    arrived=context.arrived,
                )
            except PodTimeout as error:
                # A full queue is no fault of the pods, and a longer wait helps.
                if watch.is_pending:
                    raise PodTimeout(
                        f"{error}. The job waited in Slurm's queue; for a longer wait use"
                        f" Cluster(…, start_timeout_s={10 * context.timeout_s:.0f})"
                    ) from error
                raise
        # `stop` may have come between the last report and now.
        self._check_open()
        limit_s = float(self.connect_timeout_s)
        ends_s = None
        try:
            found = commands.jobs([number]).get(number)
            ends_s = found.ends_s if found is not None else None
        except BackendError as error:  # the next look asks again
            logger.info("the end of job %s is unknown so far: %s", number, error)
        leave_s = self.notice_s - _BESIDES_S
        return [
            replace(pod, connect_timeout_s=limit_s, ends_s=ends_s, leave_s=leave_s) for pod in came
        ]

    def _submit(
        self,
        name: str,
        names: Sequence[str],
        spec: PodSpec,
        context: LaunchContext,
        taken: Sequence[str],
    ) -> str:
        """Submit the job. The note has the job's name first, and then its id."""
        if self._around:
            return self._start_step(name, names, spec, context, taken)
        comment = f"DeepSpeed Workbench, cluster {context.cluster_id}"
        # Without a number of cores, a pod takes the share of its GPUs.
        cores = spec.cores
        if spec.gpus and spec.cpus is None:
            cores = cores_to_ask(spec, commands.gpu_nodes(self.partition, self.gpu_type or ""))
        if few := spec.few_cores(cores):
            context.report(f"the nodes have {few}")
        given = {"partition": self.partition, "time": self.time, "account": self.account}
        options = [
            *job.sbatch_options(
                name,
                comment,
                self._folder,
                spec,
                len(names),
                cores=cores,
                gpu_type=self.gpu_type or "",
                notice_s=self.notice_s,
                requeue=self.requeue,
            ),
            *(f"--{option}={value}" for option, value in given.items() if value is not None),
            *self.arguments,
        ]
        if taken:
            # sbatch reads the last --exclude alone.
            own = [word.partition("=")[2] for word in self.arguments if word.startswith(_EXCLUDE)]
            options.append(f"{_EXCLUDE[0]}{','.join([*own, *taken])}")
        # The name is noted before the submit: a keeper that dies in between leaves a job that the
        # next keeper finds.
        with self._starting:
            script = self._announce(name, names, spec, context, cores)
            self._ids[name] = commands.submit(options, script)
            self._note(context.directory)
            return self._ids[name]

    def _announce(
        self,
        name: str,
        names: Sequence[str],
        spec: PodSpec,
        context: LaunchContext,
        cores: float,
        **inside: Sequence[str],
    ) -> str:
        """Note the name of a job or step before its start, and return the script."""
        self._check_open()
        self._launched.update(names)
        self._ids[name] = ""
        self._job_of.update(dict.fromkeys(names, name))
        self._note(context.directory)
        container = self._container_of(spec)
        package = Path(HOME) if container is None else self._packed()
        return job.script(
            name, names, self._folder, cores, self.setup, container, package, **inside
        )

    def _start_step(
        self,
        name: str,
        names: Sequence[str],
        spec: PodSpec,
        context: LaunchContext,
        taken: Sequence[str],
    ) -> str:
        """Start the pods as steps of the job around the notebook; return the script's own step."""
        there = allocation.read(self._around, self.gpu_type or "")
        nodes = there.free(taken)[: len(names)]
        if len(nodes) < len(names):
            raise BackendError(
                f"the Slurm job {self._around} around the notebook has"
                f" {pluralize(len(nodes), 'node')} without pods, and {len(names)} are needed"
            )
        cores = self._cores_in(there, spec)
        if few := spec.few_cores(cores):
            context.report(f"the nodes have {few}")
        options = [
            f"--jobid={self._around}",
            "--overlap",
            *(job.resource_options(spec, self.gpu_type or "")),
            *([] if spec.gpus else ["--gres=none"]),
        ]
        with self._starting:
            script = self._announce(
                name, names, spec, context, cores, nodes=nodes, step_options=options
            )
            file = self._folder / f"{name}.sh"
            self._files.append(file)
            write_text(file, script)
            srun, number = allocation.start(self._around, name, nodes[0], file)
            self._sruns.append(srun)
            self._ids[name] = number
            file.with_suffix(".log").rename(job.log_of(self._folder, number))
            self._note(context.directory)
            return number

    def _container_of(self, spec: PodSpec) -> Container | None:
        if spec.image is None:
            return None
        container = Container(
            image=spec.image,
            runner=runner_here(),
            mounts=[self._folder.parent, Path(self.root)],
            gpus=spec.gpus > 0,
        )
        container.check()
        if self.setup and container.runner is Runner.PYXIS:
            raise ConfigError(
                f"SlurmPods.setup is {list(self.setup)!r} with PodSpec.image {spec.image!r}. pyxis"
                " starts the pod inside the container, where the node's modules are missing. Leave"
                " setup out, and set variables by PodSpec(env=…)"
            )
        return container

    def _packed(self) -> Path:
        """Write this package beside the pods' configurations, for the image's Python."""
        name, data = package_zip()
        file = self._folder / name
        write_bytes(file, data)
        self._files.append(file)
        return file

    def _note(self, directory: Path) -> None:
        note = note_of(directory, JOBS)
        if note not in self._files:
            self._files.append(note)
        content = {"ids": self._ids, "job_of": self._job_of, "around": self._around}
        write_note(directory, JOBS, content)

    def _own_address(self) -> str:
        """Return this machine's address on the route to the nodes."""
        nodes = commands.node_addresses(self.partition or "") or commands.node_addresses()
        for node in nodes[:3]:
            if address := own_address_to(node):
                return address
        raise BackendError(
            f"this machine, {socket.gethostname()}, has no route to Slurm's nodes"
            f" ({', '.join(nodes[:3]) or 'sinfo lists none'}); run the notebook on a login node"
        )

    def restore(self, lost: Collection[str], spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Submit another job for lost pods, or wait for their requeued job; see `Place.restore`."""
        again = self._requeued(lost)
        if again:
            lost = {pod for pod, of in self._job_of.items() if of == again}
        names = sorted(lost, key=[pod.name for pod in self._pods].index)
        taken = [] if again else self._end_pods(names)
        own = PurePosixPath(self._pods[0].root).parent
        try:
            came = self._launch_job(names, str(own), spec, context, taken, again)
        except WorkbenchError as error:
            with context.reporting_unstopped():
                self._end_pods(names)
            self._pods = [_failed(pod, error) if pod.name in lost else pod for pod in self._pods]
            raise
        replacements = {pod.name: pod for pod in came}
        self._pods = [replacements.get(pod.name, pod) for pod in self._pods]
        return list(self._pods)

    def _requeued(self, lost: Collection[str]) -> str:
        """Return the name of the lost pods' job if Slurm has queued it again; else nothing.

        All pods of such a job are lost. A requeued job that runs again has found no keeper.
        """
        jobs = {self._job_of[pod] for pod in lost}
        name = jobs.pop()
        if not self.requeue or jobs:
            return ""
        number = self._ids[name]
        deadline = time.monotonic() + _COMPLETES_S
        while time.monotonic() < deadline:
            self._check_open()
            found = commands.jobs([number]).get(number)
            if found is None or found.state != "COMPLETING":
                break
            time.sleep(_FIRST_LOOKS_S)
        if found is None or not found.is_pending:
            return ""
        # The log says that the pods have ended.
        job.log_of(self._folder, number).unlink(missing_ok=True)
        return name

    def _end_pods(self, names: Collection[str]) -> list[str]:
        """End the jobs without other pods, and the steps of the pods in other jobs.

        Returns the nodes of the other pods: two pods may not share a node.
        """
        ended: list[str] = []
        taken: list[str] = []
        for name, number in list(self._ids.items()):
            pods = {pod for pod, of in self._job_of.items() if of == name}
            if pods <= set(names):
                ended += self._to_cancel(name, number)
                del self._ids[name]
                self._files.append(leaving_file(self._folder, commands.job_of(number)))
                continue
            found = commands.steps(commands.job_of(number))
            running = {pod: found.get(job.step_name(name, pod)) for pod in pods}
            taken += [step.nodes for pod, step in running.items() if step and pod not in names]
            commands.cancel([step.id for pod, step in running.items() if step and pod in names])
        self._cancel(ended)
        return taken

    def adopt(self, pods: Sequence[Pod], _spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Take the jobs over, by the ids in their keeper's note."""
        self._recall(context.directory)
        if any(not self._id_of(pod.name) for pod in pods):
            raise BackendError(
                f"{note_of(context.directory, JOBS)} does not hold the jobs of all pods; start"
                " another cluster"
            )
        self._launched = {pod.name for pod in pods}
        self._pods = list(pods)
        return self.refresh()

    def _recall(self, directory: Path) -> None:
        note = read_note(directory, JOBS)
        self._around = str(note.get("around", ""))
        self._folder = directory.absolute() / "pods"
        self._ids = {name: str(number) for name, number in get_object(note, "ids").items()}
        self._job_of = {pod: str(name) for pod, name in get_object(note, "job_of").items()}
        self._files = []
        if note:
            configs = records.files_in(self._folder, "pod-*.json")
            packages = records.files_in(self._folder, "workbench-*.zip")
            scripts = records.files_in(self._folder, "workbench-*.sh")
            self._files = [note_of(directory, JOBS), *configs, *packages, *scripts]

    def _id_of(self, pod: str) -> str:
        return self._ids.get(self._job_of.get(pod, ""), "")

    def refresh(self) -> list[Pod]:
        """Ask Slurm for the jobs, at most every five seconds.

        While Slurm's controller does not answer, the pods stay as they were.
        """
        now_s = time.monotonic()
        if self._pods and (not self._looked_s or now_s - self._looked_s >= _LOOK_S):
            self._looked_s = now_s
            try:
                jobs = commands.jobs(list(self._ids.values()))
            except BackendError as error:
                logger.warning("%s", error)
                return list(self._pods)
            logs = {number: self._job_log(number) for number in self._ids.values()}
            self._pods = [self._seen(pod, jobs, logs) for pod in self._pods]
        return list(self._pods)

    def _seen(self, pod: Pod, jobs: Mapping[str, Job], logs: Mapping[str, str]) -> Pod:
        if pod.phase.is_terminal:
            return pod
        number = self._id_of(pod.name)
        log = logs.get(number, "")
        found = jobs.get(number)
        code = job.ended_pods(log).get(pod.name)
        if found is None:
            words = f"Slurm no longer lists {commands.named(number)}"
        elif found.has_ended or found.is_pending:  # an administrator may queue a job again
            words = found.words()
        elif code is not None:
            words = f"its step of job {commands.job_of(number)} has ended with exit code {code}"
        else:
            message = "" if found.state == "RUNNING" else found.words()
            return replace(pod, message=message, ends_s=found.ends_s)
        own = tail_of(self._log(pod.name), _LINES_SHOWN)
        why = job.why_job_ended(log) or job.why_step_ended(own, commands.job_of(number))
        return replace(pod, phase=Phase.FAILED, message=f"{words}: {why}" if why else words)

    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of a pod and its SSH daemon; also after `stop`."""
        if name not in self._launched:
            raise ConfigError(
                f"no pod {name!r} was launched; there are:"
                f" {', '.join(sorted(self._launched)) or 'none'}"
            )
        return tail_of(self._log(name), tail)

    def stop(self) -> None:
        """Cancel the jobs or steps of `launch` and no others.

        An unreachable pod ends by its lease or by the time limit.
        """
        with self._starting:
            self._stopped = True
        ids = self._ids
        files = self._files
        self._ids = {}
        self._job_of = {}
        self._pods = []
        self._files = []
        self._looked_s = 0.0
        self._end(ids)
        jobs = map(commands.job_of, ids.values())
        for file in [*files, *(leaving_file(self._folder, number) for number in jobs)]:
            file.unlink(missing_ok=True)

    def _end(self, ids: dict[str, str]) -> None:
        numbers = []
        for name, number in ids.items():
            numbers += self._to_cancel(name, number)
        self._cancel(numbers)
        self._sruns = [srun for srun in self._sruns if not ended_within(srun, _END_S)]

    def _to_cancel(self, name: str, number: str) -> list[str]:
        """Return the ids of a job, or of a script's step and the steps of the script's pods."""
        if self._around:
            steps = commands.steps(self._around).items()
            return [step.id for each, step in steps if each.startswith(name)]
        # The keeper was killed before Slurm's answer: the name is unique.
        return [number] if number else commands.jobs_named(name)

    def _cancel(self, numbers: Sequence[str]) -> None:
        if self._around:
            # Slurm kills a cancelled step at once. TERM lets a pod remove its folder.
            commands.cancel(numbers, "--signal=TERM")
            self._await_end(numbers)
            numbers = list(commands.jobs(numbers))
        commands.cancel(numbers)
        self._await_end(numbers)

    def _await_end(self, numbers: Sequence[str]) -> None:
        """Wait until the processes of the jobs have ended, for ten seconds at most."""
        deadline = time.monotonic() + _END_S
        pause_s = 0.1
        while numbers and time.monotonic() < deadline:
            if all(found.is_gone for found in commands.jobs(numbers).values()):
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def remove_left(self, directory: Path) -> None:
        """Cancel the jobs of a dead keeper, by the noted ids."""
        self._recall(directory)
        if self._ids:
            self.stop()

    def _check_open(self) -> None:
        if self._stopped:
            raise PodError("the pods were stopped before all had reported")

    def _log(self, pod: str) -> Path:
        return self._folder / f"{pod}.log"

    def _job_log(self, number: str) -> str:
        """Return the end of a job's log; empty without a log."""
        return tail_of(job.log_of(self._folder, number))


def _failed(pod: Pod, error: WorkbenchError) -> Pod:
    return replace(pod, phase=Phase.FAILED, message=str(error))


class _StartWatch:
    """The state of a job until the job's pods have reported."""

    def __init__(
        self, place: SlurmPods, number: str, names: Iterable[str], context: LaunchContext
    ) -> None:
        self._place = place
        self._number = number
        self._names = list(names)
        self._context = context
        self._told = ""
        self._job: Job | None = None
        self._pause_s = _FIRST_LOOKS_S
        self._due_s = time.monotonic()

    @property
    def is_pending(self) -> bool:
        """Whether Slurm had not started the job at the last look."""
        return self._job is not None and self._job.is_pending

    def status_of(self, name: str) -> str:
        """Return the state of a missing pod for people."""
        words = self._job.words() if self._job is not None else f"job {self._number}"
        if self.is_pending:
            return words
        line = tail_of(self._place._log(name), 1) or "none"
        return f"{words}, last log line: {line}"

    def look(self) -> None:
        """Ask Slurm for the job now and then; PodError if the pods cannot come any more."""
        self._place._check_open()
        if time.monotonic() < self._due_s:
            return
        found = commands.jobs([self._number]).get(self._number)
        self._job = found
        self._pause_s = min(1.5 * self._pause_s, _LOOK_S)
        self._due_s = time.monotonic() + self._pause_s
        log = self._place._job_log(self._number)
        for name, code in job.ended_pods(log).items():
            raise PodError(
                f"{name} ended with exit code {code} during its start."
                f" {self._last_lines(log, name)}"
            )
        if found is None or found.has_ended:
            gone = f"Slurm no longer lists {commands.named(self._number)}"
            state = found.words() if found is not None else gone
            raise PodError(f"{state} before all pods had reported. {self._last_lines(log)}")
        if found.is_pending and found.reason in _HOPELESS:
            raise BackendError(f"Slurm will not start the job: {found.words()}")
        if found.is_pending:
            self._tell(found.words())

    def _tell(self, words: str) -> None:
        """Report a new reason for the wait."""
        if words == self._told:
            return
        self._told = words
        self._context.arrived([Pod(name=name, message=words) for name in self._names])
        self._context.report(words)

    def _last_lines(self, log: str, name: str = "") -> str:
        lines = tail_of(self._place._log(name), _LINES_SHOWN) if name else ""
        shown = lines or "\n".join(log.splitlines()[-_LINES_SHOWN:])
        if shown:
            return f"Last lines of its log:\n{shown}"
        return (
            f"It has no log: the nodes must share {self._place._folder} with this machine; give"
            " Cluster(…, path=…) a folder that they share"
        )
