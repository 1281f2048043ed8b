"""Export a run to Kubeflow as manifests.

The run directory may come from another user, so files named there are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError, one_of
from workbench.base.files import read_json, user_path
from workbench.base.json_values import get_object
from workbench.handover.kubeflow.files import config_files, handover_of
from workbench.handover.kubeflow.kinds import KINDS
from workbench.handover.kubeflow.objects import JobKind, KubeflowPlan, objects_of
from workbench.handover.kubeflow.options import HandoverOptions
from workbench.jobs.registry import job_from_dict
from workbench.jobs.script_folder import travelling
from workbench.pods.kubernetes.manifests.objects import base_name
from workbench.pods.kubernetes.manifests.volumes import made_claims
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import stored

_UNUSED = ("connect_timeout_s", "pull_timeout_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Displayable):
    """Kubernetes objects of a run. `str()` returns YAML that starts with instructions."""

    kind: str
    """Kind of the Kubeflow job, such as trainjob."""
    name: str
    nodes: int
    """Number of nodes; the maximum for an elastic job."""
    slots: int
    image: str
    results: str
    """Place of the results: claim and folder, as `claim:/folder`."""
    objects: Sequence[Mapping[str, object]] = field(repr=False)
    """Objects in the order of creation, the job last."""
    notes: Sequence[str] = field(default=(), repr=False)
    """Requirements, instructions and remarks, a line per note."""

    def to_yaml(self, path: str | Path) -> Path:
        """Write the YAML to a file. An existing file is replaced."""
        target = user_path(path).absolute()
        try:
            target.write_text(self.to_text(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the manifest {target}: {error.strerror or error}"
            ) from error
        return target

    def to_text(self, *, folded: bool = False) -> str:
        objects = [_folded(each) for each in self.objects] if folded else self.objects
        texts = [yaml_of(each) for each in objects]
        head = "".join(f"# {note}\n" for note in self.notes)
        return head + "---\n".join(texts)

    def __repr__(self) -> str:
        ranks = f"{self.nodes} x {self.slots} ranks"
        return (
            f"Manifest({self.kind} {self.name}, {ranks} of {self.image}, results in {self.results})"
        )


def manifest_of(path: Path, kind: str, given: Mapping[str, object]) -> Manifest:
    """Build the manifests of a run; see `Run.manifest`."""
    if kind not in tuple(KINDS):
        raise one_of("manifest kind", kind, tuple(KINDS))
    job_kind = KINDS[kind]
    _refuse_unused(given)
    paths = RunPaths(path)
    raw = stored(read_json(paths.spec))
    run_id = str(read_json(paths.info).get("id", path.name))
    cluster = get_object(raw, "cluster")
    job = job_from_dict(get_object(raw, "job"))
    run_pod = PodSpec.from_dict(get_object(cluster, "pods"))
    backend = get_object(cluster, "backend")
    # Options of the cluster's own Kubernetes place are the default.
    options = HandoverOptions.from_dict(
        {**(backend if backend.get("kind") == HandoverOptions.kind else {}), **given}
    )
    pod = (options.pod or run_pod).replace(env=run_pod.env, pip=run_pod.pip)
    options = options.replace(image=options.image or pod.image or "")
    _check(job_kind, options)
    handover = handover_of(job, path, options)
    count = int(str(raw.get("pods") or cluster.get("count") or 1))
    # A technique of one rank takes one node and one GPU, however many the cluster has.
    nodes = job.rules.capped(options.elastic[1] if options.elastic else count)
    is_one_rank = job.rules.capped(nodes * pod.slots) == 1
    name = options.name or base_name(run_id, "")[:40].rstrip("-")
    plan = KubeflowPlan(
        kind=job_kind,
        name=name,
        options=options,
        pod=pod.replace(gpus=min(pod.gpus, 1)) if is_one_rank else pod,
        nodes=nodes,
        files=config_files(handover, job.env, options, pod, nodes),
        resumes=handover.resumes,
        carries_script=handover.archive is not None,
    )
    return Manifest(
        kind=kind,
        name=name,
        nodes=nodes,
        slots=plan.pod.slots,
        image=options.image,
        results=f"{plan.claim}:/{name}",
        objects=objects_of(plan),
        notes=_notes(plan, run_id),
    )


def _refuse_unused(given: Mapping[str, object]) -> None:
    """Refuse limits of `KubernetesPods` for its own connections and starts."""
    for name in _UNUSED:
        if name in given:
            raise ConfigError(
                f"{name} has no effect in a manifest, as nothing is sent to the cluster: "
                "leave it out"
            )
    if "pod_template" in given:
        raise ConfigError(
            "pod_template is for the pods of KubernetesPods: Kubeflow makes the pods of a manifest."
            " Leave pod_template out, and add its fields to the manifest by hand"
        )


def _check(kind: JobKind, options: HandoverOptions) -> None:
    if not options.image:
        raise ConfigError(
            "a manifest needs the image of its containers, with this project's requirements: "
            "run.manifest(…, image='REGISTRY/deepspeed-workbench/worker:latest')"
        )
    if options.elastic is not None and not kind.elastic:
        raise ConfigError(
            f"elastic is a policy of PyTorchJobs; a {kind.name} "
            "has a fixed number of nodes: leave it out"
        )
    if options.restarts is not None and not kind.restarts_ranks:
        raise ConfigError(
            f"restarts is an option of PyTorchJobs; the runtime of a {kind.name} decides on "
            "restarts: leave restarts out, and set the runtime's failurePolicy"
        )


def _notes(plan: KubeflowPlan, run_id: str) -> list[str]:
    options = plan.options
    at = f" -n {options.namespace}" if options.namespace else ""
    operator = plan.kind.operator(options)
    notes = [f"The run {run_id} as a {plan.kind.name} for unattended use. It takes {operator}."]
    # What the user has to prepare comes first, then the start, then what happens later.
    if plan.pod.pip:
        notes.append(
            "The image must have the packages that the run's "
            f"pods were given: {', '.join(plan.pod.pip)}."
        )
    if options.pvc:
        several = " (ReadWriteMany where nodes are several)" if plan.nodes > 1 else ""
        notes.append(f"The claim {options.pvc} must be there{several}.")
    if made := [volume.claim for volume in made_claims(options.volumes)]:
        notes.append(
            f"It makes the claim {', '.join(made)}, which "
            "stays; where there is one, that one is taken."
        )
    if plan.carries_script:
        notes.append(f"It carries {travelling(plan.files['inputs.zip'])}.")
    for secret, key in sorted(set(options.sources.values())):
        notes.append(
            f"The Secret: kubectl{at} create secret generic {secret} --from-literal={key}=…"
        )
    notes.append(
        f"Start: kubectl{at} create -f FILE   (not apply, "
        "which keeps a second copy, of 256 KiB at most)"
    )
    notes.append(
        f"The results: folder {plan.name} on the claim "
        f"{plan.claim}, a run directory that Run.load reads."
    )
    if options.pod_template:
        notes.append(
            "The cluster's pod_template is not part of the manifest. Add its fields to the pods of"
            " the job by hand."
        )
    notes += plan.kind.notes(plan)
    begin = "continue from the last checkpoint" if plan.resumes else "begin again"
    if plan.restarts and plan.kind.restarts_ranks:
        notes.append(f"Ranks that fail are started again and {begin}.")
    if options.elastic is not None:
        notes.append(f"When nodes come or go, all ranks {begin}, as many as there are then.")
    return notes


def yaml_of(data: Mapping[str, object]) -> str:
    r"""Return JSON values as readable YAML: original order, block texts, no anchors.

    Example:
        >>> print(yaml_of({"b": 1, "a": "x\ny\n"}), end="")
        b: 1
        a: |
          x
          y
    """
    import yaml  # Installed with transformers.

    # Packed files are long, and the C emitter is ten times as fast.
    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        def ignore_aliases(self, _data: Any) -> bool:
            return True  # Repeated values are written in full.

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
        )

    Dumper.add_representer(str, text)
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, width=110))


def _folded(each: Mapping[str, object]) -> Mapping[str, object]:
    packed = each.get("binaryData")
    if not isinstance(packed, dict):
        return each
    sizes = {name: f"({len(text) * 3 // 4 / 1024:.0f} KiB)" for name, text in packed.items()}
    return {**each, "binaryData": sizes}
