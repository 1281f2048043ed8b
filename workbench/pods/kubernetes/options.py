"""What `KubernetesPods` can be told: one record, checked when it is made. Knows no manifest and opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from workbench.base.errors import ConfigError, one_of
from workbench.pods.hostfile import check_port

__all__ = ["KubernetesOptions", "Reach"]

Reach = Literal["auto", "direct", "port-forward"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]*)/(?P<key>[A-Za-z0-9._-]+)")
_OURS = ("app.kubernetes.io/managed-by", "deepspeed-workbench/")


@dataclass(kw_only=True, eq=False)
class KubernetesOptions:
    """Where and how Kubernetes runs the pods."""

    image: str = ""
    """Container image of the pods, with sshd and the pinned requirements; `PodSpec.image` goes before it."""
    namespace: str = ""
    """Namespace of all that is made. Default: the one this notebook runs in, or the kubeconfig's, or `default`."""
    kubeconfig: str = ""
    """Path of a kubeconfig. Default: the service account where this runs in a cluster, else `KUBECONFIG` or
    `~/.kube/config`."""
    context: str = ""
    """Context of the kubeconfig. Default: its current one."""
    reach: Reach = "auto"
    """How SSH gets to the pods: `direct` to their addresses, or through the API server's `port-forward`. Default
    `auto`: direct inside a cluster, port-forward outside."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name under which the cluster counts GPUs. Default `nvidia.com/gpu`."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have. Default none."""
    tolerations: Sequence[Mapping[str, object]] = ()
    """Taints that the pods put up with, as in a pod's manifest. Default none."""
    affinity: Mapping[str, object] = field(default_factory=dict)
    """Affinity, as in a pod's manifest. Default none."""
    priority_class: str = ""
    """Priority class of the pods. Default: the cluster's."""
    service_account: str = ""
    """Service account of the pods; they get no token of it. Default: the namespace's."""
    image_pull_secrets: Sequence[str] = ()
    """Secrets with which the image is pulled. Default none."""
    run_as_user: int | None = 1000
    """User id of everything in a pod, never 0; it needs a name in the image. None takes the image's. Default 1000."""
    shm_gib: float = 1.0
    """Size of `/dev/shm`, which counts as memory of the pod. Default 1."""
    pvc: str = ""
    """A volume claim for the pods' folders, which then stay there when the pods go. Default none: they go too."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment from Secrets, variable to `secret/key`, as in `{"HF_TOKEN": "hub/token"}`. Default none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels on all that is made, beside ours. Default none."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations on the pods. Default none."""
    queue: str = ""
    """Kueue's local queue: the pods become one pod group, admitted together or not at all. Default none."""
    pod_group_label: str = ""
    """A label that is set to the cluster's name on every pod, for other gang schedulers. Default none."""
    port: int = 2222
    """Port of the pods' SSH daemons. Default 2222."""
    python: str = "python3"
    """The image's Python that has torch and DeepSpeed. Default `python3`."""
    deadline_s: int = 86_400
    """Seconds after which Kubernetes ends every pod, whatever happens. Default a day."""

    def __post_init__(self) -> None:
        if self.kubeconfig:  # whoever reads it works in another folder
            self.kubeconfig = str(Path(self.kubeconfig).expanduser().absolute())
        if self.reach not in get_args(Reach):
            raise one_of("KubernetesPods.reach", self.reach, get_args(Reach))
        for name in ("namespace", "priority_class", "service_account", "pvc", "queue"):
            self._check_name(name, getattr(self, name))
        for secret in self.image_pull_secrets:
            self._check_name("image_pull_secrets", secret)
        user = self.run_as_user
        if user is not None and (isinstance(user, bool) or not isinstance(user, int) or user < 1):
            raise ConfigError(f"KubernetesPods.run_as_user is {user!r}; pods never run as root: 1 or more, or None")
        for name in ("shm_gib", "deadline_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"KubernetesPods.{name} is {value!r}; it must be a number, more than 0")
        check_port(self.port)
        if self.port < 1024:
            raise ConfigError(f"KubernetesPods.port is {self.port}; pods do not run as root, so it must be above 1023")
        self._check_mappings()

    def secret_key(self, variable: str) -> tuple[str, str]:
        """Return the Secret and its key that a variable is taken from."""
        name, _, key = self.secrets[variable].partition("/")
        return name, key

    def to_dict(self) -> dict[str, object]:
        """Return the options that are not the default; holds no secret."""
        given = {}
        for option in fields(KubernetesOptions):
            value = getattr(self, option.name)
            default = option.default if option.default_factory is MISSING else option.default_factory()
            if value != default and not (default == () and not value):
                given[option.name] = list(value) if isinstance(value, tuple) else value
        return given

    def _check_name(self, option: str, value: object) -> None:
        if not isinstance(value, str) or (value and not _NAME.fullmatch(value)):
            raise ConfigError(
                f"KubernetesPods.{option} is {value!r}; names in Kubernetes have lower-case letters, digits, - and ."
            )

    def _check_mappings(self) -> None:
        for name in ("node_selector", "secrets", "labels", "annotations"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(x, str) for pair in value.items() for x in pair):
                raise ConfigError(f"KubernetesPods.{name} is {value!r}; it must be a mapping of text to text")
        for variable, source in self.secrets.items():
            if not _VARIABLE.fullmatch(variable) or not _SECRET_KEY.fullmatch(source):
                raise ConfigError(
                    f"KubernetesPods.secrets has {variable!r}; write the variable and where it is found, as in"
                    ' {"HF_TOKEN": "hub/token"} for the key token of the Secret hub; the token itself never stands here'
                )
        for label in [*self.labels, *filter(None, [self.pod_group_label])]:
            if label.startswith(_OURS):
                raise ConfigError(
                    f"KubernetesPods.labels has {label!r}, by which we find our own objects; leave it out"
                )
