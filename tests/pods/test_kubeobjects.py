"""The manifests, ours and shipped, against the schemas of Kubernetes; and what they must hold."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import V1Pod

from tests.fakes.kubeplace import MANIFESTS
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.pods.backends import backend_from_dict
from workbench.pods.bootstrap import pod_main
from workbench.pods.kubernetes.manifests.objects import ClusterObjects, HostKey, Owner, base_name
from workbench.pods.kubernetes.manifests.template import read_template
from workbench.pods.kubernetes.manifests.volumes import Volume
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.kubernetes.pods import KubernetesPods
from workbench.pods.pod_spec import PodSpec

VERSIONS = ("1.28", "1.37")
PUBLIC_KEY = (
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDm8HPuLLvBjeJk+Ybo+4CioaLUU5LYYZAMmVGIHvGtu workbench"
)
KEYS = [HostKey.generate(), HostKey.generate()]
OWNER = Owner(name="jupyterlab-7f", uid="u-1")
EVERYTHING: dict[str, Any] = {
    "image": "example.org/worker:1",
    "gpu_resource": "amd.com/gpu",
    "node_selector": {"gpu": "mi300"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "host"}]
        }
    },
    "priority_class": "high",
    "service_account": "worker",
    "image_pull_secrets": ["registry"],
    "run_as_user": 1234,
    "shm_gib": 16,
    "capabilities": ["IPC_LOCK"],
    "ephemeral_storage_gib": 200,
    "extra_resources": {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"},
    "pvc": "data",
    "volumes": [
        {"mount": "/data", "claim": "datasets", "read_only": True, "sub_path": "wikisql"},
        {
            "mount": "/models",
            "claim": "hub",
            "size_gib": 100,
            "storage_class": "nfs",
            "hub_cache": True,
        },
        {"mount": "/kept", "claim": "runs", "size_gib": 0.5, "keep": True},
        {"mount": "/config", "config_map": "settings"},
        {"mount": "/nvme", "host_path": "/mnt/nvme"},
        {"mount": "/home/team", "nfs": "files.example.org:/exports/team"},
        {"mount": "/scratch", "size_gib": 50},
        {"mount": "/fast", "size_gib": 50, "storage_class": "local-nvme"},
        {"mount": "/hugepages", "medium": "HugePages-2Mi"},
    ],
    "secrets": {"HF_TOKEN": "hub/token"},
    "labels": {"team": "nlp"},
    "annotations": {"note": "mine"},
    "queue": "lab",
    "pod_group_label": "scheduling.x-k8s.io/pod-group",
    "pod_template": {
        "spec": {
            "schedulerName": "volcano",
            "runtimeClassName": "nvidia",
            "initContainers": [
                {"name": "rxdm", "image": "example.org/rxdm:1", "restartPolicy": "Always"}
            ],
        }
    },
    "port": 2022,
    "python": "/opt/venv/bin/python",
    "deadline_s": 3600,
}


def objects(spec: PodSpec | None = None, **options: Any) -> ClusterObjects:
    return ClusterObjects(
        base="wb-test-0a1b2c",
        namespace="lab",
        options=KubernetesOptions(**{"image": "example.org/worker:1", **options}),
        spec=spec or PodSpec(cpus=2, memory_gib=8, gpus=1, env={"WANDB_API_KEY": "canary-5f1e"}),
        count=2,
        lease_s=60.0,
        wait_s=120.0,
    )


def all_of(made: ClusterObjects) -> list[dict[str, Any]]:
    claims = [made.claim(volume, OWNER) for volume in made.claims]
    return [
        made.pod(0, None),
        made.pod(1, OWNER),
        made.service(OWNER),
        made.network_policy(OWNER, None, direct=False),
        made.network_policy(OWNER, OWNER, direct=True),
        made.secret(PUBLIC_KEY, KEYS, OWNER),
        *claims,
    ]


@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"run_as_user": None}], ids=["least", "everything", "own user"]
)
def test_what_is_made_is_what_kubernetes_takes(options: dict[str, Any]) -> None:
    for version in VERSIONS:
        for manifest in all_of(objects(**options)):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_check_sees_a_wrong_manifest() -> None:
    manifest: Any = objects().pod(0, None)
    manifest["spec"]["containers"][0]["ressources"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_every_shipped_manifest_is_valid_and_listed() -> None:
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == sorted(
        path.name for path in MANIFESTS.glob("*.yaml") if path.name != "kustomization.yaml"
    )
    names, images = set(), set()
    for name in kustomization["resources"]:
        for document in yaml.safe_load_all((MANIFESTS / name).read_text()):
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
            if document["kind"] != "Namespace":
                assert document["metadata"]["namespace"] == kustomization["namespace"]
            names.add((document["kind"], document["metadata"]["name"]))
            for container in (
                document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
            ):
                images.add(container["image"])
    assert {
        ("Namespace", "workbench"),
        ("Role", "workbench"),
        ("Deployment", "jupyterlab"),
    } <= names
    assert images == {image["name"] for image in kustomization["images"]}


def may_connect(source: dict[str, str], target: Any, port: str | int) -> bool:
    """Whether the shipped policies let a pod with these labels connect to a port of another."""
    policies = [
        p["spec"] for p in yaml.safe_load_all((MANIFESTS / "networkpolicy.yaml").read_text())
    ]
    labels = target["metadata"]["labels"]
    own = [p for p in policies if p["podSelector"]["matchLabels"].items() <= labels.items()]
    rules = [rule for policy in own for rule in policy["ingress"]]
    named = {
        p["name"]: p["containerPort"] for c in target["spec"]["containers"] for p in c["ports"]
    }
    wanted = named.get(port, port)
    return not own or any(
        any(peer["podSelector"]["matchLabels"].items() <= source.items() for peer in rule["from"])
        and (
            "ports" not in rule
            or any(named.get(p["port"], p["port"]) == wanted for p in rule["ports"])
        )
        for rule in rules
    )


def test_the_shipped_policies_let_in_the_notebook_and_peers_alone() -> None:
    documents = yaml.safe_load_all((MANIFESTS / "jupyterlab.yaml").read_text())
    notebook = next(document for document in documents if document["kind"] == "Deployment")["spec"][
        "template"
    ]
    worker: Any = objects(port=2022, labels={"team": "nlp"}).pod(1, OWNER)
    theirs, ours, stranger = (
        worker["metadata"]["labels"],
        notebook["metadata"]["labels"],
        {"app": "stranger"},
    )
    assert may_connect(theirs, worker, "ssh")
    assert may_connect(theirs, worker, 29500)  # gloo and NCCL take any port
    assert may_connect(ours, worker, 2022)
    assert not may_connect(ours, worker, 29500)
    for port in ("ssh", 29500):
        assert not may_connect(stranger, worker, port)
    for labels in (theirs, stranger):
        assert not may_connect(labels, notebook, "http")


def test_the_shipped_role_reads_and_deletes_no_secret() -> None:
    documents = yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text())
    rules = next(document for document in documents if document["kind"] == "Role")["rules"]
    assert {verb for rule in rules if "secrets" in rule["resources"] for verb in rule["verbs"]} == {
        "create"
    }
    assert all("*" not in (*rule["verbs"], *rule["resources"]) for rule in rules)


def test_all_options_arrive() -> None:
    pod: Any = objects(**EVERYTHING).pod(1, OWNER)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert container["resources"] == {
        kind: {
            **{
                "cpu": "2000m",
                "memory": "8192Mi",
                "ephemeral-storage": "204800Mi",
                "amd.com/gpu": "1",
            },
            **{"vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"},
        }
        for kind in ("requests", "limits")
    }
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec["nodeSelector"] == EVERYTHING["node_selector"]
    assert spec["tolerations"] == EVERYTHING["tolerations"]
    assert spec["affinity"] == EVERYTHING["affinity"]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("high", "worker")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1234
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert {"name": "work", "persistentVolumeClaim": {"claimName": "data"}} in spec["volumes"]
    assert (spec["schedulerName"], spec["runtimeClassName"]) == ("volcano", "nvidia")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16384Mi"}} in spec[
        "volumes"
    ]
    assert {"name": "HF_HOME", "value": "/models"} in container["env"]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in container["env"]
    assert container["command"][0] == "/opt/venv/bin/python"
    assert container["ports"] == [{"name": "ssh", "containerPort": 2022}]
    labels = pod["metadata"]["labels"]
    assert labels["team"] == "nlp"
    assert labels["kueue.x-k8s.io/queue-name"] == "lab"
    assert (
        labels["kueue.x-k8s.io/pod-group-name"]
        == labels["scheduling.x-k8s.io/pod-group"]
        == "wb-test-0a1b2c"
    )
    assert pod["metadata"]["annotations"] == {
        "note": "mine",
        "karpenter.sh/do-not-disrupt": "true",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "kueue.x-k8s.io/pod-group-total-count": "2",
    }
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u-1"


GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"
TEMPLATE = """
apiVersion: v1
kind: Pod
metadata:
  labels: {cost-center: "4711"}
  annotations: {cluster-autoscaler.kubernetes.io/safe-to-evict: "true"}
spec:
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  runtimeClassName: nvidia
  schedulerName: volcano
  nodeSelector: {zone: b}
  tolerations: [{key: spot, operator: Exists}]
  topologySpreadConstraints:
    - {maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}
  securityContext: {supplementalGroups: [4000]}
  initContainers:
    - {name: rxdm, image: "example.org/rxdm:1", restartPolicy: Always}
  containers:
    - name: worker
      env: [{name: LD_PRELOAD, value: /opt/fast.so}]
      volumeMounts: [{name: fast, mountPath: /opt/fast}]
  volumes:
    - {name: fast, hostPath: {path: /opt/fast}}
"""


def test_a_pod_template_is_merged_below_the_workbenchs_pod(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(TEMPLATE.replace('safe-to-evict: "true"', 'other: "yes"'))
    own: dict[str, Any] = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "node_selector": {"gpu": "h100"},
        "run_as_user": None,
    }
    options = KubernetesOptions(image="example.org/worker:1", pod_template=str(path), **own)
    again = KubernetesOptions.from_dict(json.loads(json.dumps(options.to_dict())))
    assert again.pod_template == options.pod_template, "the file is not read a second time"
    plain: Any = objects(**own).pod(0, None)
    pod: Any = objects(pod_template=str(path), **own).pod(0, None)
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)
    spec, before = pod["spec"], plain["spec"]
    assert pod["metadata"]["labels"] == {**plain["metadata"]["labels"], "cost-center": "4711"}
    assert spec["tolerations"] == [*before["tolerations"], {"key": "spot", "operator": "Exists"}]
    assert spec["nodeSelector"] == {"gpu": "h100", "zone": "b"}
    assert spec["securityContext"] == {**before["securityContext"], "supplementalGroups": [4000]}
    assert [each["name"] for each in spec["initContainers"]] == ["account", "rxdm"]
    (worker,) = spec["containers"]
    assert worker["env"][-1] == {"name": "LD_PRELOAD", "value": "/opt/fast.so"}
    assert worker["volumeMounts"][-1] == {"name": "fast", "mountPath": "/opt/fast"}
    assert {name: worker[name] for name in ("command", "ports", "image")} == {
        name: before["containers"][0][name] for name in ("command", "ports", "image")
    }
    assert spec["volumes"] == [
        *before["volumes"],
        {"name": "fast", "hostPath": {"path": "/opt/fast"}},
    ]
    others = ("hostNetwork", "dnsPolicy", "runtimeClassName", "schedulerName")
    assert not set(others) & set(before)
    assert set(others) < set(spec)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"metadata": {"name": "mine"}}, "metadata.name"),
        ({"metadata": {"namespace": "other"}}, "metadata.namespace"),
        ({"metadata": {"labels": {"deepspeed-workbench/cluster": "x"}}}, "cluster"),
        ({"metadata": {"labels": {"app.kubernetes.io/managed-by": "x"}}}, "managed-by"),
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "x"}}}, "give queue="),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy 'Always'.*'Never'"),
        ({"spec": {"hostname": "x"}}, "spec.hostname 'x'"),
        ({"spec": {"activeDeadlineSeconds": 5}}, "activeDeadlineSeconds 5.*86400"),
        ({"spec": {"automountServiceAccountToken": True}}, "automountServiceAccountToken True"),
        ({"spec": {"containers": [{"name": "worker", "command": ["sh"]}]}}, "command.*'sh'"),
        ({"spec": {"containers": [{"name": "worker", "image": "x"}]}}, "worker.*image 'x'"),
        (
            {"spec": {"containers": [{"name": "worker", "ports": [{"name": "ssh"}]}]}},
            r"ports\[ssh\]",
        ),
        (
            {
                "spec": {
                    "containers": [{"name": "worker", "env": [{"name": "POD_IP", "value": "1"}]}]
                }
            },
            r"env\[POD_IP\]",
        ),
        ({"spec": {"containers": [{"name": "sidecar"}]}}, "sidecar.*restartPolicy: Always"),
        ({"spec": {"containers": {"name": "worker"}}}, "spec.containers: give a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, "its name"),
        ({"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}, "a stands there twice"),
        ({"spec": {"volumes": [{"name": "secret", "emptyDir": {}}]}}, r"volumes\[secret\]"),
        ({"spec": {"affinity": {"nodeAffinity": {}}}}, "spec.affinity"),
        ({"spec": []}, "spec: give an object"),
        ({"metadata": {"labels": {1: "x"}}, "spec": {"hostname": "x"}}, "hostname"),
        ({"kind": "Deployment"}, "kind: Deployment is no pod"),
        ({"hostNetwork": True}, "hostNetwork: .*leave the field out"),
        (
            {
                "spec": {
                    "containers": [
                        {"name": "worker", "volumeMounts": [{"name": "a", "mountPath": "/tmp/"}]}
                    ]
                }
            },
            r"volumeMounts\[/tmp\]",
        ),
        (
            {"spec": {"containers": [{"name": "worker", "resources": {"limits": {GPU: 8}}}]}},
            "limits.nvidia.com/gpu '8'.*give another PodSpec",
        ),
        (
            {"spec": {"containers": [{"name": "worker", "resources": {"limits": {MIG: 1}}}]}},
            r"has nvidia.com/mig-1g.10gb: a GPU carries a rank; give PodSpec\(gpus=…\)",
        ),
        # A field of the container would replace the pod's field.
        (
            {"spec": {"containers": [{"name": "worker", "securityContext": {"runAsUser": 0}}]}},
            "worker.*securityContext.runAsUser 0: .*1000.*give run_as_user=",
        ),
        (
            {"spec": {"containers": [{"name": "worker", "restartPolicy": "Always"}]}},
            "worker.*restartPolicy 'Always': .*'Never'",
        ),
        *(
            (
                {"spec": {"containers": [{"name": "worker", "resources": resources}]}},
                f"worker.*resources.limits.{words}",
            )
            for resources, words in (
                # The pod's GPU requests eight cores, and has no limit of its own.
                ({"limits": {"cpu": 4}}, "cpu '4': .*request '8000m'.*another PodSpec"),
                ({"limits": {"cpu": "7900m"}}, "cpu '7900m': .*request '8000m'"),
                ({"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}, "memory '4Gi'"),
            )
        ),
        (
            {"spec": {"containers": [{"name": "worker", "securityContext": {"privileged": True}}]}},
            "worker.*privileged: .*give capabilities=",
        ),
        ({"spec": {"serviceAccount": "x"}}, "spec.serviceAccount: .*serviceAccountName"),
        # No option of KubernetesPods changes the field.
        ({"spec": {"enableServiceLinks": True}}, "True: .* have False; leave the line out$"),
        ({"spec": {"terminationGracePeriodSeconds": 600}}, "600: .* have 30.*give notice_s="),
        ({"kind": "PodTemplate", "template": {"spec": {}}}, "kind: PodTemplate is no pod"),
        ([{"spec": {}}], "is a list; it must be an object"),
        ("no such file.yaml", "no such file.yaml"),
    ],
)
def test_a_pod_template_that_contradicts_the_workbenchs_pod_is_refused(
    template: Any, words: str
) -> None:
    affinity = {"podAffinity": {}}
    with pytest.raises(ConfigError, match=f"(?s)pod_template.*{words}"):
        objects(PodSpec(gpus=1), pod_template=template, affinity=affinity)


@pytest.mark.parametrize(("options", "notice_s"), [({}, 30), ({"notice_s": 600}, 600)])
def test_the_time_before_a_pods_end_is_the_sites_and_the_ranks_have_most_of_it(
    options: dict[str, Any], notice_s: int
) -> None:
    spec: Any = objects(**options).pod(0, None)["spec"]
    assert spec["terminationGracePeriodSeconds"] == notice_s
    (worker,) = spec["containers"]
    assert pod_main._options(worker["args"]).leave_s == notice_s - 5


OF_SITES: dict[str, dict[str, Any]] = {
    "a sidecar": {
        "initContainers": [{"name": "proxy", "image": "istio/proxyv2:1", "restartPolicy": "Always"}]
    },
    "an affinity": {
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "hostname"}]
            }
        }
    },
    "the network of the host": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"},
    "resource claims": {
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "h100"}],
        "containers": [{"name": "worker", "resources": {"claims": [{"name": "gpus"}]}}],
    },
    "devices": {"containers": [{"name": "worker", "resources": {"limits": {"rdma/hca": "1"}}}]},
    "variables of a map": {
        "containers": [{"name": "worker", "envFrom": [{"configMapRef": {"name": "site"}}]}]
    },
    "secrets of a registry": {"imagePullSecrets": [{"name": "registry"}]},
    "a hook": {
        "containers": [
            {"name": "worker", "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}}}
        ]
    },
}


@pytest.mark.parametrize("spec", OF_SITES.values(), ids=OF_SITES)
def test_what_sites_write_is_in_the_pod_beside_all_of_the_workbenchs_own(
    spec: dict[str, Any],
) -> None:
    plain: Any = objects().pod(0, None)
    pod: Any = objects(pod_template={"spec": spec}).pod(0, None)
    kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    assert lacks(plain, pod) == lacks({"spec": spec}, pod) == []


def test_amounts_are_compared_as_kubernetes_reads_them() -> None:
    """In YAML an amount is often a number, and equal amounts have several spellings."""
    resources: Any = {
        "limits": {GPU: 1, "rdma/hca": 4, "memory": "8Gi"},
        "requests": {"cpu": 2, "memory": "8192Mi"},
    }
    template: Any = {"spec": {"containers": [{"name": "worker", "resources": resources}]}}
    template["spec"]["overhead"] = {"cpu": 0.25}
    plain: Any = objects().pod(0, None)
    pod: Any = objects(pod_template=template).pod(0, None)
    V1Pod.model_validate(pod)  # as when a pod is created
    assert pod["spec"].pop("overhead") == {"cpu": "0.25"}
    assert pod["spec"]["containers"][0]["resources"]["limits"].pop("rdma/hca") == "4"
    assert pod == plain


def lacks(wanted: Any, found: Any, at: str = "") -> list[str]:
    """What of one manifest is missing in another. Lists of objects are compared by name."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [
            each for key in wanted for each in lacks(wanted[key], found.get(key), f"{at}.{key}")
        ]
    if isinstance(wanted, list) and isinstance(found, list):
        missing = []
        for number, item in enumerate(wanted):
            named = [each for each in found if isinstance(each, dict) and "name" in each]
            same = [each for each in named if each["name"] == item.get("name")] or found
            if all(lacks(item, each) for each in same):
                missing.append(f"{at}[{number}]")
        return missing
    return [] if wanted == found else [at]


def with_nulls(value: Any, places: list[tuple[str, ...]], at: tuple[str, ...] = ()) -> Any:
    """A manifest with null at these places, where it has no such field."""
    if not isinstance(value, dict):
        return value
    made = {key: with_nulls(each, places, (*at, key)) for key, each in value.items()}
    for place in places:
        if place[:-1] == at:
            made.setdefault(place[-1], None)
    return made


@given(
    st.lists(
        st.sampled_from(
            [
                ("metadata",),
                ("spec",),
                ("metadata", "creationTimestamp"),
                ("metadata", "labels"),
                ("spec", "containers"),
                ("spec", "volumes"),
                ("spec", "affinity"),
                ("spec", "tolerations"),
                ("spec", "hostname"),
                ("spec", "securityContext"),
                ("status",),
            ]
        )
    ),
    st.sampled_from([{}, {"spec": {"hostNetwork": True}}, {"metadata": {"labels": {"a": "b"}}}]),
)
def test_a_field_that_is_null_is_a_field_that_is_not_there(
    places: list[tuple[str, ...]], template: dict[str, Any]
) -> None:
    """`kubectl create --dry-run -o yaml` and Helm write such fields."""
    written = with_nulls(template, places)
    assert objects(pod_template=written).pod(0, None) == objects(pod_template=template).pod(0, None)


def test_a_cluster_is_reached_by_its_own_pods_and_the_notebook_alone() -> None:
    def ingress(notebook: Owner | None, *, direct: bool) -> Any:
        policy: Any = objects().network_policy(OWNER, notebook, direct=direct)
        assert policy["spec"]["podSelector"] == {"matchLabels": own}
        assert policy["metadata"]["ownerReferences"][0]["uid"] == "u-1"
        return policy["spec"]["ingress"]

    own = {"deepspeed-workbench/cluster": "wb-test-0a1b2c"}
    peers = {"from": [{"podSelector": {"matchLabels": own}}]}
    ssh = {"ports": [{"protocol": "TCP", "port": 2222}]}
    notebook = Owner(name="lab", uid="u", labels={"app": "lab", "pod-template-hash": "5f"})
    from_notebook = {"from": [{"podSelector": {"matchLabels": {"app": "lab"}}}]}
    assert ingress(None, direct=False) == [peers]
    assert ingress(notebook, direct=True) == [peers, {**ssh, **from_notebook}]
    assert ingress(None, direct=True) == [peers, ssh], "the notebook is in another namespace"


@pytest.mark.parametrize("text", ["- a", "a: [", "a: 'canary", ""])
def test_a_pod_template_that_is_no_yaml_of_a_pod_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"pod_template is the file .*pod\.yaml") as refused:
        KubernetesPods(image="x", pod_template=str(path))
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("spec: {hostNetwork: true}\nspec: {hostPID: true}\n", 2),
        ("spec:\n  volumes:\n    - name: a\n      emptyDir: {}\n      name: b\n", 5),
        ("metadata: &a {labels: {b: c}}\nspec: {hostPID: true, hostPID: false}\n", 2),
        ("spec: {x: &a {b: 1}, y: {<<: *a, <<: *a, b: 2}, z: [*a, *a]}\n", None),
        ("spec: &a {b: [*a]}\n", None),
    ],
)
def test_a_field_that_a_template_has_twice_is_refused_by_its_line(
    tmp_path: Path, text: str, line: int | None
) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    if line is None:
        assert set(read_template(str(path))) == {"spec"}  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=f"where line {line} repeats a field"):
        read_template(str(path))


def test_a_gpu_pod_gets_cores_for_its_gpus_and_no_limit_of_cores() -> None:
    def resources(spec: PodSpec) -> Any:
        pod: Any = objects(spec).pod(0, None)
        return pod["spec"]["containers"][0]["resources"]

    eight = resources(PodSpec(gpus=8, memory_gib=64))
    assert eight["requests"] == {"cpu": "64000m", "memory": "65536Mi", "nvidia.com/gpu": "8"}
    assert eight["limits"] == {"memory": "65536Mi", "nvidia.com/gpu": "8"}
    said = resources(PodSpec(gpus=8, cpus=96))
    assert said["requests"]["cpu"] == said["limits"]["cpu"] == "96000m"
    without = resources(PodSpec())
    assert without["requests"] == without["limits"] == {"cpu": "1000m"}


def test_volumes_arrive_with_their_sources_and_mounts() -> None:
    made = objects(**EVERYTHING)
    spec: Any = made.pod(1, OWNER)["spec"]
    sources = {volume.pop("name"): volume for volume in spec["volumes"]}
    mounts = {mount.pop("mountPath"): mount for mount in spec["containers"][0]["volumeMounts"]}
    own = {
        mount: sources[mounts[mount]["name"]]
        for mount in (each["mount"] for each in EVERYTHING["volumes"])
    }
    template = {"accessModes": ["ReadWriteOnce"], "storageClassName": "local-nvme"}
    assert own == {
        "/data": {"persistentVolumeClaim": {"claimName": "datasets", "readOnly": True}},
        "/models": {"persistentVolumeClaim": {"claimName": "hub"}},
        "/kept": {"persistentVolumeClaim": {"claimName": "runs"}},
        "/config": {"configMap": {"name": "settings"}},
        "/nvme": {"hostPath": {"path": "/mnt/nvme"}},
        "/home/team": {"nfs": {"server": "files.example.org", "path": "/exports/team"}},
        "/scratch": {"emptyDir": {"sizeLimit": "51200Mi"}},
        "/fast": {
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {**template, "resources": {"requests": {"storage": "51200Mi"}}}
                }
            }
        },
        "/hugepages": {"emptyDir": {"medium": "HugePages-2Mi"}},
    }
    assert mounts["/data"] == {"name": "volume-0", "readOnly": True, "subPath": "wikisql"}
    assert mounts["/config"] == {"name": "volume-3", "readOnly": True}
    assert mounts["/models"] == {"name": "volume-1"}
    claims: Any = [made.claim(volume, OWNER) for volume in made.claims]
    shared = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "102400Mi"}}}
    assert claims[0]["spec"] == {**shared, "storageClassName": "nfs"}
    assert [claim["metadata"]["name"] for claim in claims] == ["hub", "runs"]
    assert ["ownerReferences" in claim["metadata"] for claim in claims] == [True, False]


@pytest.mark.parametrize(
    ("volume", "words"),
    [
        (
            {},
            sentence("needs the option", "Volume", "mount", "Absolute path in the pods"),
        ),
        (
            {"mount": "data"},
            sentence("it must be an absolute path in the pods", "data"),
        ),
        (
            {"mount": "/tmp/"},
            sentence("it must be an absolute path in the pods", "/tmp/", "/tmp"),
        ),
        (
            {"mount": "/a/../tmp"},
            sentence("it must be an absolute path in the pods", "/a/../tmp"),
        ),
        (
            {"mount": "/d", "claim": "a", "nfs": "s:/d"},
            sentence(
                "has {}; a volume has a single source: write two volumes", "at /d", "claim and nfs"
            ),
        ),
        (
            {"mount": "/d", "claim": "A b"},
            sentence("a name as Kubernetes takes it", "claim is 'A b'") + sentence("it must be"),
        ),
        (
            {"mount": "/d", "nfs": "/exports"},
            sentence("as in 'files.example.org:/exports/data", "/exports"),
        ),
        (
            {"mount": "/d", "host_path": "mnt"},
            sentence("give an absolute path of the nodes", "mnt"),
        ),
        (
            {"mount": "/d", "sub_path": "../x"},
            sentence("give a path within the volume", "../x"),
        ),
        (
            {"mount": "/d", "nfs": "s:/d", "size_gib": 1},
            sentence("has size_gib, but the size of {} is fixed; leave size_gib out", "nfs"),
        ),
        (
            {"mount": "/d", "claim": "a", "storage_class": "b"},
            sentence("give size_gib too"),
        ),
        (
            {"mount": "/d", "claim": "a", "keep": True},
            sentence("give claim and size_gib too"),
        ),
        (
            {"mount": "/d", "claim": "a", "medium": "Memory"},
            sentence("has medium, an option of empty folders only; leave medium out"),
        ),
        (
            {"mount": "/d", "medium": "RAM"},
            sentence("it must be", "medium is 'RAM'") + sentence("HugePages' or a size of pages"),
        ),
        (
            {"mount": "/d", "size_gib": 0},
            sentence("it must be", "size_gib is 0", "a number more than 0"),
        ),
        (
            {"mount": "/d", "claim": "a", "hub_cache": True, "read_only": True},
            sentence("is the hub's cache and can only be read"),
        ),
        ({"mount": "/d", "pvc": "a"}, sentence("is not known", "pvc")),
    ],
)
def test_a_volume_that_cannot_be_is_refused(volume: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KubernetesPods(image="x", volumes=[volume])


@pytest.mark.parametrize(
    ("volumes", "words"),
    [
        (
            [Volume(mount="/d"), Volume(mount="/d/", claim="a")],
            sentence("KubernetesPods.volumes mounts two volumes at", "/d"),
        ),
        (
            [Volume(mount="/a", hub_cache=True), Volume(mount="/b", hub_cache=True)],
            sentence("KubernetesPods.volumes has two caches of the hub", "/a and /b"),
        ),
        (
            [Volume(mount=f"/{name}", claim="c", size_gib=1) for name in "ab"],
            sentence("KubernetesPods.volumes makes the claim", "c"),
        ),
        (
            "/data",
            sentence("it must be", "volumes is '/data'") + sentence('as in [Volume(mount="/data'),
        ),
    ],
)
def test_volumes_that_contradict_each_other_are_refused(volumes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KubernetesPods(image="x", volumes=volumes)


def test_a_user_id_of_the_clusters_choice_gets_a_name_before_the_daemon_starts() -> None:
    spec: Any = objects(run_as_user=None).pod(0, None)["spec"]
    (first,), container = spec["initContainers"], spec["containers"][0]
    assert (first["image"], first["args"]) == (
        container["image"],
        ["--account", "/workbench-account/passwd"],
    )
    assert first["resources"]["limits"] == {"cpu": "2000m", "memory": "8192Mi"}
    mount = {"name": "account", "mountPath": "/etc/passwd", "subPath": "passwd", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert "initContainers" not in objects().pod(0, None)["spec"]  # type: ignore[operator]


def test_pods_keep_to_the_restricted_standard_and_get_no_token() -> None:
    for options, mode in (({}, 0o440), ({"run_as_user": None}, 0o444)):
        spec: Any = objects(**options).pod(0, None)["spec"]
        container = spec["containers"][0]
        assert spec["volumes"][0]["secret"]["defaultMode"] == mode
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert spec["automountServiceAccountToken"] is False


def test_no_secret_stands_in_a_pod_and_each_pod_gets_only_its_own_host_key() -> None:
    made = objects(secrets={"HF_TOKEN": "hub/token"})
    shown = (
        json.dumps([made.pod(0, None), made.pod(1, OWNER), made.service(OWNER)])
        + repr(made)
        + repr(KEYS)
    )
    assert "canary-5f1e" not in shown.replace(repr(made.spec), "")  # a spec shows its own variables
    assert "PRIVATE KEY" not in shown
    pod: Any = made.pod(1, OWNER)
    items = {item["key"] for item in pod["spec"]["volumes"][0]["secret"]["items"]}
    assert items == {"start.py", "authorized_keys", "pod-1", "pod-1.pub"}
    secret: Any = made.secret(PUBLIC_KEY, KEYS, OWNER)
    data = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert items <= set(data)
    assert data["authorized_keys"] == f"restrict {PUBLIC_KEY.removesuffix(' workbench')}\n"
    assert "PasswordAuthentication no" in data["start.py"]


@pytest.mark.parametrize(
    "name", ["cluster-20261121-170804-ab12", "Mein Lauf!", "ä", "x" * 200, "-", ""]
)
def test_names_are_dns_labels(name: str) -> None:
    made = base_name(name, "0a1b2c")
    longest = f"{made}-4095"
    assert len(longest) <= 63
    assert all(
        part.isalnum() and part.isascii() and part == part.lower() for part in longest.split("-")
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"namespace": "Lab"},
            sentence("a name as Kubernetes takes it", "namespace is 'Lab'")
            + sentence("it must be"),
        ),
        ({"pvc": "a/b"}, "pvc is 'a/b'"),
        (
            {"reach": "tunnel"},
            sentence("is not known", "reach 'tunnel'", "port-forward"),
        ),
        (
            {"run_as_user": 0},
            sentence("1 or more, as pods never run as root, or None", "run_as_user is 0")
            + sentence("it must be"),
        ),
        (
            {"shm_gib": 0},
            sentence("it must be", "shm_gib is 0", "a number more than 0"),
        ),
        ({"deadline_s": True}, "deadline_s is True"),
        (
            {"port": 22},
            sentence(
                "a port above 1023, as pods do not run as root, and at most 65535", "port is 22"
            )
            + sentence("it must be"),
        ),
        ({"port": "ssh"}, "port is 'ssh'"),
        (
            {"labels": {"a": 1}},
            sentence("is {}; it must be an object", "labels", "a dict")
            + sentence("an object of text to text"),
        ),
        (
            {"labels": {"deepspeed-workbench/cluster": "mine"}},
            sentence("the workbench's own mark of its objects"),
        ),
        (
            {"secrets": {"HF_TOKEN": "hf_abcdefghij"}},
            sentence('hub/token"} for the key token of the Secret hub', "HF_TOKEN"),
        ),
        (
            {"secrets": {"A B": "hub/token"}},
            sentence('hub/token"} for the key token of the Secret hub', "A B"),
        ),
        (
            {"extra_resources": {"cpu": 2}},
            sentence('write a device as in {"rdma/hca_shared_devices_a', "cpu", 2),
        ),
        (
            {"extra_resources": {"rdma/hca": "1"}},
            sentence('write a device as in {"rdma/hca_shared_devices_a', "rdma/hca", 1),
        ),
        (
            {"extra_resources": {"hugepages-2Mi": 5}},
            sentence('write a device as in {"rdma/hca_shared_devices_a'),
        ),
        (
            {"capabilities": ["CAP_IPC_LOCK"]},
            sentence("write the name as Kubernetes does", "CAP_IPC_LOCK"),
        ),
        (
            {"capabilities": ["ALL"]},
            sentence("write the name as Kubernetes does", "ALL"),
        ),
        ({"ephemeral_storage_gib": -1}, "ephemeral_storage_gib is -1"),
    ],
)
def test_what_no_server_would_take_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KubernetesPods(image="x", **options)


def test_a_token_in_the_wrong_place_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        KubernetesPods(secrets={"HF_TOKEN": "hf_abcdefghij"})
    assert "hf_abcdefghij" not in str(refused.value)


def test_pods_without_an_image_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=sentence("Kubernetes pods need an image with sshd and the pinned")
    ):
        objects(image="")
    assert (
        objects(spec=PodSpec(image="example.org/other:2"), image="").image == "example.org/other:2"
    )


def test_options_travel_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = KubernetesPods(**EVERYTHING)
    data = json.loads(json.dumps(made.to_dict()))
    again = backend_from_dict(data)
    monkeypatch.chdir(tmp_path)
    assert KubernetesPods(kubeconfig="config").kubeconfig == str(tmp_path / "config")
    assert again.to_dict() == data == {"kind": "kubernetes", **EVERYTHING}
    assert repr(KubernetesPods(image="x", pvc="data")) == "KubernetesPods(image='x', pvc='data')"
    with pytest.raises(
        ConfigError,
        match=sentence("option {} is not known", "node_selectors", "node_selector")
        + sentence(": did you mean '{}'?"),
    ):
        backend_from_dict({"kind": "kubernetes", "node_selectors": {}})


def test_a_missing_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=sentence("KubernetesPods needs the kubernetes package")):
        KubernetesPods(image="x")
