"""`Volume`: a source and a mount point in the pods, checked when made. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from workbench.base.errors import ConfigError
from workbench.base.record import Allowed, Positive, Record, Unit

_OURS = (
    "/",
    "/dev/shm",
    "/etc/mpi-ssh",
    "/etc/passwd",
    "/etc/workbench",
    "/results",
    "/tmp",
    "/workbench",
)


def _check_mount(mount: str) -> str:
    path = PurePosixPath(mount)
    if not path.is_absolute() or ".." in path.parts or ":" in mount or str(path) in _OURS:
        raise ConfigError(
            f"Volume.mount is {mount!r}; it must be an absolute path in the pods, as in '/data',"
            " and none of"
            f" {', '.join(_OURS)}"
        )
    return str(path)


def _check_sub_path(sub_path: str) -> str:
    if sub_path.startswith("/") or ".." in PurePosixPath(sub_path).parts:
        raise ConfigError(
            f"Volume.sub_path is {sub_path!r}; give a path within the volume, as in 'team/wikisql'"
        )
    return sub_path


def _check_host_path(path: str) -> str:
    if path and not PurePosixPath(path).is_absolute():
        raise ConfigError(
            f"Volume.host_path is {path!r}; give an absolute path of the nodes, as in '/mnt/nvme'"
        )
    return path


def _check_nfs(place: str) -> str:
    server, _, path = place.partition(":")
    if place and not (server and PurePosixPath(path).is_absolute()):
        raise ConfigError(
            f"Volume.nfs is {place!r}; give server and folder, as in"
            " 'files.example.org:/exports/data'"
        )
    return place


Name = Annotated[
    str,
    Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"),
    Allowed("a name as Kubernetes takes it, of lower-case letters, digits, - and ."),
]


class Volume(Record):
    """A volume of Kubernetes pods and its mount point.

    Without a source: an empty folder per pod.
    """

    label: ClassVar[str] = "Volume"

    mount: Annotated[str, AfterValidator(_check_mount)]
    """Absolute path in the pods."""
    claim: Name = ""
    """Volume claim, shared by all pods. With `size_gib` the claim is created; without, it must
    exist."""
    config_map: Name = ""
    """A ConfigMap; its keys are files that can only be read."""
    host_path: Annotated[str, AfterValidator(_check_host_path)] = ""
    """Folder or file of the pod's node; most clusters forbid host paths."""
    nfs: Annotated[str, AfterValidator(_check_nfs)] = ""
    """A folder of an NFS server, `server:/folder`."""
    read_only: bool = False
    """Whether pods can only read it. Default false."""
    sub_path: Annotated[str, AfterValidator(_check_sub_path)] = ""
    """Folder or file of the volume to mount. Default: all of it."""
    size_gib: Annotated[Positive, Unit("GiB")] | None = None
    """Size of the claim to create, or the limit of an empty folder, in GiB. Default None."""
    storage_class: Name = ""
    """Storage class of the created claim. Without `claim`, every pod gets its own claim, which is
    removed with the pod. Default: the cluster's."""
    keep: bool = False
    """Whether the created claim stays when the cluster ends. An existing claim of the name is then
    used as it is. Default false."""
    medium: Annotated[
        str,
        Field(pattern=r"^(|Memory|HugePages(-\d+[KMG]i)?)$"),
        Allowed("'', 'Memory', 'HugePages' or a size of pages, as in 'HugePages-2Mi'"),
    ] = ""
    """What an empty folder lies on: the node's disk, `Memory`, or huge pages as `HugePages-2Mi`.
    Default: the disk."""
    hub_cache: bool = False
    """Whether it is the hub's cache, HF_HOME: with a claim, all pods fetch a model once. Default
    false."""

    def model_post_init(self, context: object) -> None:
        """Refuse contradictory options."""
        super().model_post_init(context)
        sources = [
            name for name in ("claim", "config_map", "host_path", "nfs") if getattr(self, name)
        ]
        source = next(iter(sources), "")
        where = f"Volume at {self.mount}"
        # An option that its source would ignore is refused.
        if len(sources) > 1:
            raise ConfigError(
                f"{where} has {' and '.join(sources)}; a volume has a single source: write two"
                " volumes"
            )
        if self.size_gib is not None and source not in ("", "claim"):
            raise ConfigError(
                f"{where} has size_gib, but the size of {source} is fixed; leave size_gib out"
            )
        if self.storage_class and (self.size_gib is None or source not in ("", "claim")):
            raise ConfigError(
                f"{where} has storage_class, an option of new claims only; give size_gib too"
            )
        if self.keep and not (self.claim and self.size_gib):
            raise ConfigError(
                f"{where} has keep, an option of new claims only; give claim and size_gib too"
            )
        if self.medium and (source or self.storage_class):
            raise ConfigError(
                f"{where} has medium, an option of empty folders only; leave medium out"
            )
        if self.hub_cache and (self.read_only or self.config_map):
            raise ConfigError(
                f"{where} is the hub's cache and can only be read; pods must write to the cache"
            )

    @property
    def is_made(self) -> bool:
        """Whether its claim is made with the cluster."""
        return bool(self.claim) and self.size_gib is not None

    def volume(self, name: str) -> dict[str, object]:
        """Return the entry of a pod's `volumes`."""
        server, _, path = self.nfs.partition(":")
        read = {"readOnly": True} if self.read_only else {}
        source: dict[str, object]
        if self.claim:
            source = {"persistentVolumeClaim": {"claimName": self.claim, **read}}
        elif self.config_map:
            source = {"configMap": {"name": self.config_map}}
        elif self.host_path:
            source = {"hostPath": {"path": self.host_path}}
        elif self.nfs:
            source = {"nfs": {"server": server, "path": path, **read}}
        elif self.storage_class:
            source = {"ephemeral": {"volumeClaimTemplate": {"spec": self.claim_spec(pods=1)}}}
        else:
            limit = {"sizeLimit": _mebibytes(self.size_gib)} if self.size_gib else {}
            source = {"emptyDir": {**({"medium": self.medium} if self.medium else {}), **limit}}
        return {"name": name, **source}

    def volume_mount(self, name: str) -> dict[str, object]:
        """Return the entry of a container's `volumeMounts`."""
        read = {"readOnly": True} if self.read_only or self.config_map else {}
        sub_path = {"subPath": self.sub_path} if self.sub_path else {}
        return {"name": name, "mountPath": self.mount, **read, **sub_path}

    def claim_spec(self, pods: int) -> dict[str, object]:
        """Return the `spec` of the claim that is made."""
        return {
            "accessModes": ["ReadWriteMany" if pods > 1 else "ReadWriteOnce"],
            **({"storageClassName": self.storage_class} if self.storage_class else {}),
            "resources": {"requests": {"storage": _mebibytes(self.size_gib or 1)}},
        }


def check_volumes(volumes: Sequence[Volume]) -> Sequence[Volume]:
    """Refuse two volumes at the same mount point, two caches, and contradictory claims."""
    mounts = [volume.mount for volume in volumes]
    twice = sorted({mount for mount in mounts if mounts.count(mount) > 1})
    if twice:
        raise ConfigError(
            f"KubernetesPods.volumes mounts two volumes at {', '.join(twice)}; give every volume"
            " its own path"
        )
    caches = [volume.mount for volume in volumes if volume.hub_cache]
    if len(caches) > 1:
        raise ConfigError(
            f"KubernetesPods.volumes has two caches of the hub, {' and '.join(caches)}; keep a"
            " single cache"
        )
    names = [volume.claim for volume in made_claims(volumes)]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigError(
            f"KubernetesPods.volumes makes the claim {', '.join(double)} twice; give size_gib at"
            " a single mount"
        )
    return volumes


def made_claims(volumes: Iterable[Volume]) -> list[Volume]:
    """Return the volumes whose claims are made with the cluster."""
    return [volume for volume in volumes if volume.is_made]


def _mebibytes(gib: float) -> str:
    return f"{round(gib * 1024)}Mi"
