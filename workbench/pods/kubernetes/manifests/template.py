"""A site's own pod template, below the workbench's pod: its checks and the merge. Pure.

Maps are merged field by field. Named lists, such as volumes, are merged by the name of their items.
Two different values for one field are a contradiction, which is refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.files import read_text, user_path

WORKER = "worker"
"""Name of the container that runs the ranks."""
OURS = ("app.kubernetes.io/managed-by", "deepspeed-workbench/", "kueue.x-k8s.io/")
"""First letters of the labels and annotations that the workbench sets itself."""
_OPTIONS = {
    "activeDeadlineSeconds": "deadline_s",
    "affinity": "affinity",
    "annotations": "annotations",
    "capabilities": "capabilities",
    "image": "image",
    "labels": "labels",
    "nodeSelector": "node_selector",
    "priorityClassName": "priority_class",
    "readOnlyRootFilesystem": "read_only_root",
    "runAsUser": "run_as_user",
    "serviceAccountName": "service_account",
    "shm": "shm_gib",
    "terminationGracePeriodSeconds": "notice_s",
}
"""Options of `KubernetesPods` by a word in the path of their field."""
_RESOURCES = ".resources."
_AMOUNTS = ("limits", "requests", "overhead")
"""Fields with amounts of resources by name."""
_GPU = re.compile(r"/(gpu(\.shared)?|mig-.*)$")
_KEYS = {"volumeMounts": "mountPath"}
_NAMED = ("containers", "initContainers", "volumes", "env", "ports", "volumeMounts")
_JOINED = ("tolerations", "topologySpreadConstraints", "imagePullSecrets", "supplementalGroups")


def read_template(template: object) -> object:
    """Return the mapping in a YAML file; other values unchanged."""
    if not isinstance(template, str | Path):
        return template
    if not str(template):
        return {}
    import yaml

    path = user_path(template)
    try:
        # YAML keeps the last of two equal fields in silence, so repeated fields are looked for.
        content = read_text(path)
        found = yaml.safe_load(content)
        twice = _written_twice(yaml.compose(content, Loader=yaml.SafeLoader))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"KubernetesPods.pod_template is the file {path}, which cannot be read: {error}"
        ) from error
    except yaml.YAMLError as error:
        # The file may be another than the user meant, so no word of it is repeated.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        why = f"which is no YAML{where}"
        if "single document" in str(getattr(error, "context", "")):
            why = "which has several YAML documents; keep the document of the pod alone"
        raise ConfigError(f"KubernetesPods.pod_template is the file {path}, {why}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"KubernetesPods.pod_template is the file {path}, which must hold one pod as YAML:"
            " metadata and spec"
        )
    if twice is not None:
        raise ConfigError(
            f"KubernetesPods.pod_template is the file {path}, where line {twice} repeats a field"
            " of the same object; delete a line"
        )
    return found


def _written_twice(root: Any) -> int | None:
    """Return the line of a key that its mapping has twice; YAML would take the last."""
    nodes = [root]
    seen = set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        names = set()
        for item in getattr(node, "value", ()):
            if isinstance(item, tuple):
                key, value = item
                if isinstance(key.value, str):
                    if key.value in names and key.value != "<<":
                        return int(key.start_mark.line) + 1
                    names.add(key.value)
                nodes.append(value)
            elif not isinstance(item, str):
                nodes.append(item)
    return None


def check_template(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a template that no pod of the workbench can follow."""
    known = ("apiVersion", "kind", "metadata", "spec")
    template = _as_read(template)
    if template.get("kind", "Pod") != "Pod":
        raise _refusal("kind", f"{template['kind']} is no pod; give metadata and spec of a pod")
    for key in template:
        if key not in known:
            raise _refusal(key, "a pod template has metadata and spec alone; leave the field out")
    # Names and labels by which the workbench finds its pods stay its own.
    metadata = _mapping(template.get("metadata"), "metadata")
    spec = _mapping(template.get("spec"), "spec")
    for key in metadata:
        if key not in ("labels", "annotations"):
            raise _refusal(
                f"metadata.{key}",
                "the workbench names its pods itself, and namespace= is an option of"
                " KubernetesPods; leave the field out",
            )
    for part in ("labels", "annotations"):
        for name in _mapping(metadata.get(part), f"metadata.{part}"):
            if str(name).startswith(OURS):
                raise _refusal(
                    f"metadata.{part}.{name}",
                    "the workbench sets and selects by this name itself; leave the line out, and"
                    " give queue= for Kueue",
                )
    # The old name of the field would be ignored beside the new one.
    if "serviceAccount" in spec:
        raise _refusal("spec.serviceAccount", "the field's name is serviceAccountName; rename it")
    for name in _names(spec.get("containers"), "spec.containers"):
        if name != WORKER:
            raise _refusal(
                f"spec.containers has {name!r}",
                f"beside {WORKER!r} a container would keep an ended pod alive; write a sidecar"
                " into initContainers with restartPolicy: Always",
            )
    return template


def merged(pod: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, object]:
    """Return the workbench's pod with the template's further fields.

    Example:
        >>> pod = {"spec": {"hostname": "pod-0", "tolerations": [{"key": "gpu"}]}}
        >>> more = {"spec": {"hostNetwork": True, "tolerations": [{"key": "spot"}]}}
        >>> spec = merged(pod, more)["spec"]
        >>> sorted(spec), spec["tolerations"]
        (['hostNetwork', 'hostname', 'tolerations'], [{'key': 'gpu'}, {'key': 'spot'}])

    Raises:
        ConfigError: The template has another value for a field of the workbench's pod.
    """
    more = {key: value for key, value in template.items() if key in ("metadata", "spec")}
    result = _merged_maps(pod, _as_read(more), "")
    _check_levels(pod["spec"], result["spec"])
    return result


def _check_levels(ours: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Refuse a field of the worker that replaces the pod's field, and GPUs without ranks."""
    for container in spec.get("containers", ()):
        at = f"spec.containers[{container['name']}]"
        wanted = container.get("resources", {})
        # The scheduler adds up GPUs of all containers, and ranks run in ours alone.
        for name in {**wanted.get("requests", {}), **wanted.get("limits", {})}:
            own = ours["containers"][0]["resources"]["limits"]
            if name not in own and _GPU.search(str(name)):
                raise _refusal(
                    f"{at}.resources has {name}",
                    "a GPU carries a rank; give PodSpec(gpus=…), and gpu_resource= for another"
                    " name",
                )
        _check_amounts(wanted, f"{at}.resources")
        if container.get("securityContext", {}).get("privileged"):
            raise _refusal(
                f"{at}.securityContext.privileged",
                "Kubernetes takes no privileged container without allowPrivilegeEscalation, and"
                " pods of this cluster have False; leave the line out, and give capabilities= of"
                " KubernetesPods",
            )
        if "restartPolicy" in container:
            _equal(ours["restartPolicy"], container["restartPolicy"], f"{at}.restartPolicy")
        # Kubernetes lets a container's value win over the pod's.
        of_pod = ours.get("securityContext", {})
        for key, value in container.get("securityContext", {}).items():
            if key in of_pod:
                _equal(of_pod[key], value, f"{at}.securityContext.{key}")


def _check_amounts(wanted: Mapping[str, Any], where: str) -> None:
    """Refuse a limit below the request, such as a limit of cores below those of the GPUs."""
    limits = wanted.get("limits", {})
    for name, request in wanted.get("requests", {}).items():
        least, most = _amount(request), _amount(limits.get(name))
        if least is not None and most is not None and least > most:
            raise _refusal(
                f"{where}.limits.{name} {limits[name]!r}",
                f"pods of this cluster request {request!r}; leave the line out, or give another"
                " PodSpec",
            )


def _as_read(value: Any, key: str = "") -> Any:
    """Return a value as Kubernetes reads it: null is no field, and amounts are text."""
    if isinstance(value, Mapping):
        fields = {name: each for name, each in value.items() if each is not None}
        kind = key if key in _AMOUNTS else ""
        return {name: _as_read(each, kind or name) for name, each in fields.items()}
    if isinstance(value, list):
        return [_as_read(each) for each in value]
    # YAML reads `nvidia.com/gpu: 8` as a number; Kubernetes' client wants text.
    is_amount = key in (*_AMOUNTS, "sizeLimit") and type(value) in (int, float)
    return str(value) if is_amount else value


def _merged_maps(ours: Mapping[str, Any], more: Mapping[str, Any], path: str) -> dict[str, Any]:
    result = dict(ours)
    for key, value in more.items():
        where = f"{path}.{key}" if path else key
        result[key] = _merged(ours[key], value, key, where) if key in ours else value
    return result


def _merged(ours: Any, more: Any, key: str, where: str) -> Any:
    # The terms of an affinity are alternatives: two lists of terms have no sum.
    if isinstance(ours, Mapping) and isinstance(more, Mapping) and key != "affinity":
        return _merged_maps(ours, more, where)
    if isinstance(ours, list) and isinstance(more, list):
        if key in _NAMED:
            return _merged_items(ours, more, _KEYS.get(key, "name"), where)
        if key in _JOINED:
            return ours + [each for each in more if each not in ours]
    return _equal(ours, more, where)


def _equal(ours: Any, more: Any, where: str) -> Any:
    if ours == more or (_RESOURCES in where and _is_same_amount(ours, more)):
        return ours
    option = next((option for word, option in _OPTIONS.items() if word in where), "")
    instead = f", or give {option}= of KubernetesPods" if option else ""
    if _RESOURCES in where:
        instead = ", or give another PodSpec"
    raise _refusal(
        f"{where} {more!r}",
        f"pods of this cluster have {ours!r}; leave the line out{instead}",
    )


def _is_same_amount(ours: Any, more: Any) -> bool:
    """Whether two quantities are equal, as 8 and "8", or "64" and "64000m"."""
    amount = _amount(ours)
    return amount is not None and amount == _amount(more)


def _amount(quantity: Any) -> Decimal | None:
    """Return a quantity as a number; None for no quantity."""
    from kubernetes.utils.quantity import parse_quantity

    try:
        return Decimal(parse_quantity(quantity))
    except (ValueError, TypeError):
        return None


def _merged_items(
    ours: Sequence[Mapping[str, Any]], more: Sequence[Any], key: str, where: str
) -> list[Any]:
    names = _names(more, where, key)
    own = {each[key]: each for each in ours}
    theirs = dict(zip(names, more, strict=True))
    result = []
    for name, item in own.items():
        change = theirs.get(name, item)
        at = f"{where}[{name}]"
        # Containers take further fields. A volume or variable with two sources would be none.
        is_container = where in ("spec.containers", "spec.initContainers")
        result.append(_merged_maps(item, change, at) if is_container else _equal(item, change, at))
    return result + [item for name, item in theirs.items() if name not in own]


def _names(items: Any, where: str, key: str = "name") -> list[str]:
    """Return the names of a list's items."""
    if items is None:
        return []
    if not isinstance(items, list):
        raise _refusal(where, f"give a list of objects with {key}")
    for item in items:
        if not isinstance(item, Mapping) or not isinstance(item.get(key), str):
            raise _refusal(where, f"give every object of the list its {key}")
    names = [item[key] for item in items]
    if key == "mountPath":
        # Two spellings of one folder would be two mounts.
        names = [posixpath.normpath(name) for name in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _refusal(where, f"{', '.join(twice)} stands there twice; keep one")
    return names


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refusal(where, "give an object of names to values")
    return value


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"KubernetesPods.pod_template: {what}: {why}")
