"""Options of `KubernetesPods`: a record, checked when made. Reads no manifest and opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.record import Allowed, Positive, Size, Unit, nested
from workbench.pods.kubernetes.manifests.template import check_template, read_template
from workbench.pods.kubernetes.manifests.volumes import Name, Volume, check_volumes
from workbench.pods.place import LocalPath, PlaceOptions

_Reach = Literal["auto", "direct", "port-forward"]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]{0,252})/(?P<key>[A-Za-z0-9._-]{1,253})")
_PAGES = re.compile(r"[1-9][0-9]*[KMG]i")
_CAPABILITY = re.compile(r"[A-Z][A-Z_]*")
_BESIDES_S = 5.0  # of the notice: until the pod has ended
_OURS = ("app.kubernetes.io/managed-by", "deepspeed-workbench/")


def _check_sources(secrets: Mapping[str, str]) -> Mapping[str, str]:
    for variable, source in secrets.items():
        if not _VARIABLE.fullmatch(variable) or not _SECRET_KEY.fullmatch(source):
            raise ConfigError(
                f"KubernetesPods.secrets has {variable!r}; write the variable and the place of"
                " its value, as in"
                ' {"HF_TOKEN": "hub/token"} for the key token of the Secret hub; the token itself'
                " never stands here"
            )
    return secrets


def _check_label(label: str) -> str:
    if label.startswith(_OURS):
        raise ConfigError(
            f"KubernetesPods.labels has {label!r}, the workbench's own mark of its objects; leave"
            " this label out"
        )
    return label


def _check_resources(resources: Mapping[str, int | str]) -> Mapping[str, int | str]:
    for name, amount in resources.items():
        if name.startswith("hugepages-"):
            is_valid = _PAGES.fullmatch(str(amount)) is not None
        else:
            is_valid = "/" in name and type(amount) is int and amount > 0
        if not is_valid:
            raise ConfigError(
                f"KubernetesPods.extra_resources has {name!r}: {amount!r}; write a device as in"
                ' {"rdma/hca_shared_devices_a": 1} or {"vpc.amazonaws.com/efa": 4}, and huge'
                " pages as in"
                ' {"hugepages-2Mi": "512Mi"}; cores, memory and GPUs stand in the PodSpec'
            )
    return resources


def _check_capability(name: str) -> str:
    if not _CAPABILITY.fullmatch(name) or name.startswith("CAP_") or name == "ALL":
        raise ConfigError(
            f"KubernetesPods.capabilities has {name!r}; write the name as Kubernetes does, as in"
            " 'IPC_LOCK'"
        )
    return name


Label = Annotated[str, AfterValidator(_check_label)]
Texts = Annotated[Mapping[str, str], Allowed("an object of text to text")]


class KubernetesOptions(PlaceOptions):
    label: ClassVar[str] = "KubernetesPods"
    kind: ClassVar[str] = "kubernetes"

    image: str = ""
    """Container image of the pods, with sshd and the pinned requirements; `PodSpec.image` goes
    before it."""
    namespace: Name = ""
    """Namespace of all objects. Default: the notebook's own, or the kubeconfig's, or `default`."""
    kubeconfig: LocalPath = ""
    """Path of a kubeconfig. Default: the service account where this runs in a cluster, else
    `KUBECONFIG` or `~/.kube/config`."""
    context: str = ""
    """Context of the kubeconfig. Default: its current one."""
    reach: _Reach = "auto"
    """How SSH gets to the pods: `direct` to their addresses, or through the API server's
    `port-forward`. Default `auto`: direct inside a cluster, port-forward outside."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name under which the cluster counts GPUs. Default `nvidia.com/gpu`."""
    node_selector: Texts = Field(default_factory=dict)
    """Labels that a node must have. Default none."""
    tolerations: Annotated[Sequence[Mapping[str, object]], Allowed("a list of objects")] = ()
    """Taints that the pods put up with, as in a pod's manifest. Default none."""
    affinity: Mapping[str, object] = Field(default_factory=dict)
    """Affinity, as in a pod's manifest. Default none."""
    priority_class: Name = ""
    """Priority class of the pods. Default: the cluster's."""
    service_account: Name = ""
    """Service account of the pods, without its token. Default: the namespace's."""
    image_pull_secrets: Annotated[Sequence[Name], Allowed("a list of names of Secrets")] = ()
    """Secrets with which the image is pulled. Default none."""
    run_as_user: Annotated[
        Size | None, Allowed("1 or more, as pods never run as root, or None")
    ] = 1000
    """User id of everything in a pod, never 0. The image must have a name for the id. None: the
    image's or the cluster's id, as on OpenShift, with or without a name. Default 1000."""
    capabilities: Annotated[
        Sequence[Annotated[str, AfterValidator(_check_capability)]], AfterValidator(tuple)
    ] = ()
    """Capabilities of the containers, as `["IPC_LOCK"]` for RDMA; all others are dropped. Default
    none."""
    read_only_root: bool = True
    """Whether the image's own files cannot be written: caches are then in the pod's folder, and
    `/tmp` is empty and the pod's own. False for images whose programs write elsewhere. Default
    true."""
    shm_gib: Annotated[Positive, Unit("GiB")] = 1.0
    """Size of `/dev/shm`, which counts as memory of the pod. Default 1."""
    ephemeral_storage_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Disk of the node that a pod may fill with its folder, `/tmp` and logs. Default: the
    namespace's."""
    extra_resources: Annotated[
        Mapping[str, int | str],
        AfterValidator(_check_resources),
        Allowed("an object of resources to amounts"),
    ] = Field(default_factory=dict)
    """Further resources of every pod: RDMA and EFA devices by number, huge pages by size. Default
    none."""
    pvc: Name = ""
    """Volume claim for the pods' folders. The folders then stay when the pods end. Default none:
    they are removed."""
    volumes: Annotated[
        Sequence[Annotated[Volume, nested(Volume.from_dict)]],
        AfterValidator(check_volumes),
        Allowed('a list of volumes, as in [Volume(mount="/data", claim="datasets")]'),
    ] = ()
    """More volumes and where they are mounted. Default none."""
    pull_timeout_s: Annotated[Positive, Unit("s")] = 1800
    """Seconds that pulling the image may take before the start's own time-out runs. Default half an
    hour."""
    connect_timeout_s: Annotated[Positive, Unit("s")] = 5
    """Time limit for a new connection to the API server or to a pod, in seconds. An answer of the
    server may take four times as long. Default 5."""
    secrets: Annotated[Texts, AfterValidator(_check_sources)] = Field(default_factory=dict)
    """Environment from Secrets, variable to `secret/key`, as in `{"HF_TOKEN": "hub/token"}`.
    Default none."""
    labels: Annotated[Mapping[Label, str], Allowed("an object of text to text")] = Field(
        default_factory=dict
    )
    """Labels on all that is made, beside ours. Default none."""
    annotations: Texts = Field(default_factory=dict)
    """Annotations on the pods. Default none."""
    queue: Name = ""
    """Kueue's local queue. The pods become one pod group: Kueue starts no pod before the queue has
    quota for all. Default none."""
    pod_group_label: Label = ""
    """A label that is set to the cluster's name on every pod, for a scheduler that reads it. The
    label alone starts no pods together. Default none."""
    pod_template: Annotated[
        Mapping[str, object],
        BeforeValidator(read_template),
        AfterValidator(check_template),
        Allowed("an object with metadata and spec of a pod, or the path of a YAML file"),
    ] = Field(default_factory=dict)
    """A pod of your site, or the path of its YAML file, with fields that have no option here:
    sidecars, `hostNetwork`, `runtimeClassName`, topology spread, `schedulerName`. The fields are
    added to every pod. A field with another value than the workbench's is refused. Default none."""
    port: Annotated[
        int,
        Field(ge=1024, le=65535),
        Allowed("a port above 1023, as pods do not run as root, and at most 65535"),
    ] = 2222
    """Port of the pods' SSH daemons. Default 2222."""
    python: str = "python3"
    """The image's Python that has torch and DeepSpeed. Default `python3`."""
    deadline_s: Annotated[Positive, Unit("s")] = 86_400
    """Seconds after which Kubernetes ends every pod in any case. Default a day."""
    notice_s: Annotated[
        int, Field(ge=10, le=86_400), Unit("s"), Allowed("a whole number from 10 to 86400")
    ] = 30
    """Time between the notice to a pod that Kubernetes ends and the end, in seconds
    (`terminationGracePeriodSeconds`). The ranks have 5 s less for a checkpoint. Default 30."""

    @property
    def leave_s(self) -> float:
        """Seconds of the notice that ranks have for a checkpoint."""
        return self.notice_s - _BESIDES_S

    @property
    def sources(self) -> Mapping[str, tuple[str, str]]:
        """Secret and key for every variable."""
        parts = {variable: source.partition("/") for variable, source in self.secrets.items()}
        return {variable: (name, key) for variable, (name, _, key) in parts.items()}
