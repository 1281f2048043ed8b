"""Our pods on a real Kubernetes: its refusals, collector, scheduler and outages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import workbench
import workbench.places
from tests.docker.test_chart import CHART, unpacked_helm
from tests.fakes.kubeplace import MANIFESTS, role
from tests.pods.conftest import Launched, on_pods
from tests.pods.controlplane.place import RealKubernetesPlace
from tests.pods.controlplane.server import NAMESPACE
from tests.support.poll import until
from tests.support.sentences import sentence
from tests.support.smalljobs import small_job
from tests.support.takeover import counting, exact, printed
from workbench import Cluster, Run
from workbench.base.errors import BackendError, PodError, PodTimeout
from workbench.pods.backends import remove_left
from workbench.pods.kubernetes import api as kubeapi
from workbench.pods.kubernetes.manifests.volumes import Volume
from workbench.pods.kubernetes.pods import RECORD
from workbench.pods.notes import note_of
from workbench.pods.pod import LaunchContext, Phase
from workbench.pods.pod_spec import PodSpec

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


def refused(
    place: RealKubernetesPlace,
    context: LaunchContext,
    kind: type[Exception],
    words: str,
    spec: PodSpec | None = None,
    **options: Any,
) -> str:
    """Launch, hold the refusal's words and that nothing is left, and return all words."""
    backend = place.backend(**options)
    with pytest.raises(kind, match=words) as error:
        backend.launch(spec or PodSpec(), 2, context)
    assert place.left(context) == []
    assert not note_of(context.directory, RECORD).exists()
    return str(error.value)


def wait_for_lines(run: Run) -> None:
    """Wait until the script of `counting` has got somewhere."""
    until(lambda: "rank 0 line 20" in printed(run, 0), 120, why=lambda: run.message)


def test_a_run_over_two_pods_leaves_nothing(place: RealKubernetesPlace, tmp_path: Path) -> None:
    job = small_job(100, 10, technique="zero1", max_steps=2, per_device_train_batch_size=2)
    with Cluster(place.backend(), PodSpec(cpus=1), count=2, path=tmp_path / "cluster") as cluster:
        pods = cluster.pods
        result = cluster.submit(job).wait(300, progress=False).raise_for_status()
        context = LaunchContext(cluster_id="", directory=cluster.path, public_key="")
        kinds = [line.split()[0] for line in place.seen()]
        assert kinds == ["Pod", "Pod", "Secret", "Service"]
    assert (result.world_size, result.steps) == (2, 2)
    assert on_pods(pods) == []
    assert place.left(context) == []


def test_the_account_may_do_what_the_shipped_role_says_and_no_more(
    place: RealKubernetesPlace,
) -> None:
    account = f"system:serviceaccount:{NAMESPACE}:workbench"
    resources = (
        "pods",
        "pods/log",
        "pods/exec",
        "pods/attach",
        "pods/portforward",
        "pods/eviction",
    )
    others = ("events", "secrets", "services", "persistentvolumeclaims", "configmaps")
    verbs = ("create", "get", "list", "watch", "update", "patch", "delete", "deletecollection")
    allowed = set()
    for resource in (*resources, *others):
        for verb in verbs:
            name, _, sub = resource.partition("/")
            asked = {"namespace": NAMESPACE, "verb": verb, "resource": name, "subresource": sub}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "metadata": {},
                "spec": {"user": account, "resourceAttributes": asked},
            }
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            if place.plane.ask("POST", path, review)["status"]["allowed"]:
                allowed.add((verb, resource))
    assert allowed == role()


def test_all_shipped_manifests_are_accepted_as_they_are(place: RealKubernetesPlace) -> None:
    files = ("jupyterlab", "networkpolicy", "pvc", "nodes/role")
    texts = [(MANIFESTS / f"{name}.yaml").read_text() for name in files]
    manifests = [each for text in texts for each in yaml.safe_load_all(text)]
    assert len(manifests) == 7
    for manifest in manifests:
        made = place.plane.create(manifest, "?dryRun=All")
        assert missing(manifest, made) == []


def test_helm_installs_the_chart_and_leaves_the_claim(
    place: RealKubernetesPlace, tmp_path: Path
) -> None:
    admin = tmp_path / "admin.kubeconfig"
    admin.write_text(json.dumps(place.plane.kubeconfig(place.plane.tokens["admin"])))
    program = unpacked_helm(tmp_path)
    where = ("--namespace", "team", "--kubeconfig", str(admin))
    image = "image.repository=registry.example.org/jupyter"
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    # The chart wants a newer server than this one, and says so when it is installed.
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub("(?m)^kubeVersion:.*$", "", text))
    # Server-side apply knows no defaults in this server's time.
    flags = ("--create-namespace", "--server-side=false", "--set", image)
    words = ("install", "lab", str(chart), *flags)
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}

    def helm(*words: str) -> str:
        done = subprocess.run(
            [program, *words, *where], capture_output=True, text=True, timeout=300, env=home
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "STATUS: deployed" in helm(*words)
        account = "/api/v1/namespaces/team/serviceaccounts"
        accounts = place.plane.ask("GET", account)["items"]
        assert len(accounts) == 2, "the namespace's default, and JupyterLab's"
        helm("uninstall", "lab")
        claims = place.plane.ask("GET", "/api/v1/namespaces/team/persistentvolumeclaims")["items"]
        assert len(claims) == 1
    finally:
        place.plane.ask("DELETE", "/api/v1/namespaces/team")


def missing(sent: Any, made: Any, where: str = "") -> list[str]:
    """Return the places where an object lacks what was sent: this server drops unknown fields."""
    if isinstance(sent, dict):
        # An empty list is the same as none.
        gone = [f"{where}.{name}" for name in sent if name not in made and sent[name] != []]
        return gone + [
            each
            for name in sent
            if name in made
            for each in missing(sent[name], made[name], f"{where}.{name}")
        ]
    if isinstance(sent, list):
        pairs = zip(sent, made, strict=True)
        return [each for one, other in pairs for each in missing(one, other, f"{where}[]")]
    return [] if sent == made else [f"{where}: {sent!r} is {made!r}"]


@pytest.fixture
def quota(place: RealKubernetesPlace, request: pytest.FixtureRequest) -> Iterator[None]:
    """A quota of the namespace on what the test's parameter names."""
    limits = getattr(request, "param", {"pods": "1"})
    where = {"name": "small", "namespace": NAMESPACE}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": where,
        "spec": {"hard": limits},
    }
    place.plane.create(quota)
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/small"
    until(lambda: place.plane.ask("GET", path)["status"].get("used"), 30, every_s=0.1)
    yield
    place.plane.delete("resourcequotas", "small")


@pytest.mark.usefixtures("quota")
def test_a_full_quota_is_told_in_the_servers_words(
    place: RealKubernetesPlace, context: LaunchContext
) -> None:
    words = "is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1"
    said = refused(place, context, BackendError, re.escape(words))
    assert "ask for fewer or smaller pods, or for a larger quota" in said


@pytest.mark.parametrize("quota", [{"limits.memory": "8Gi"}], indirect=True)
@pytest.mark.usefixtures("quota")
def test_a_quota_on_memory_names_the_option(
    place: RealKubernetesPlace, context: LaunchContext
) -> None:
    words = r"failed quota: small: must specify limits.memory.*say memory_gib= in the PodSpec"
    refused(place, context, BackendError, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"service_account": "nobody"},
            'error looking up service account workbench/nobody: serviceaccount "nobody" not found',
        ),
        ({"priority_class": "urgent"}, "no PriorityClass with name urgent was found"),
        ({"labels": {"team": "not a value"}}, "a valid label must be an empty string or consist"),
        (
            {"namespace": "elsewhere"},
            'cannot list resource "pods" in API group "" in the namespace',
        ),
        ({"tolerations": [{"operator": "Perhaps"}]}, "Perhaps"),
    ],
)
def test_what_the_server_refuses_is_told_in_its_words(
    place: RealKubernetesPlace, context: LaunchContext, options: dict[str, Any], words: str
) -> None:
    refused(place, context, BackendError, re.escape(words), **options)


def test_an_account_without_the_role_is_told_which_file_has_it(
    place: RealKubernetesPlace, context: LaunchContext
) -> None:
    stranger = place.plane.kubeconfig(place.plane.tokens["stranger"])
    place.kubeconfig.write_text(json.dumps(stranger))
    words = (
        'User "stranger" cannot list resource "pods" in API group "" in the namespace "workbench"'
    )
    said = refused(place, context, BackendError, re.escape(words))
    assert "docker/kubernetes/rbac.yaml has the Role that is needed" in said
    place.kubeconfig.write_text(json.dumps(place.plane.kubeconfig("no-such-token")))
    refused(place, context, BackendError, "Unauthorized; the credentials are not valid")
    # With the mistakes mended, the same directory serves.
    place.kubeconfig.write_text(json.dumps(place.plane.kubeconfig(place.plane.account_token())))
    with pytest.raises(BackendError, match='in the namespace "elsewhere"'):
        place.backend(namespace="elsewhere").launch(PodSpec(), 1, context)
    backend = place.backend()
    assert len(backend.launch(PodSpec(), 1, context)) == 1
    backend.stop()


def test_the_schedulers_words_are_told_once(
    place: RealKubernetesPlace, context: LaunchContext
) -> None:
    said: list[str] = []
    short = replace(context, timeout_s=10.0, report=said.append)
    words = "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    text = refused(place, short, PodTimeout, re.escape(words), PodSpec(gpus=8))
    assert text.count("Insufficient") == 1, "both pods have one reason, and say it together"
    assert any("pod-0 and pod-1 (Unschedulable: 0/1 nodes" in line for line in said)


def test_what_is_not_there_ends_the_start_at_once(
    place: RealKubernetesPlace, context: LaunchContext
) -> None:
    patient = replace(context, timeout_s=100.0)
    words = 'persistentvolumeclaim "datasets" not found'
    volumes = [Volume(mount="/data", claim="datasets")]
    refused(place, patient, PodError, words, volumes=volumes)
    words = 'CreateContainerConfigError: secret "hub" not found'
    refused(place, patient, PodError, words, secrets={"HF_TOKEN": "hub/token"})
    words = 'did not start: FailedMount: .*configmap "settings" not found'
    volumes = [Volume(mount="/settings", config_map="settings")]
    refused(place, patient, PodError, words, volumes=volumes)


def test_a_claim_is_made_bound_and_removed_with_the_cluster(
    place: RealKubernetesPlace, context: LaunchContext
) -> None:
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "disk"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "2Gi"},
            "hostPath": {"path": "/tmp"},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }
    place.plane.create(volume)
    try:
        backend = place.backend(volumes=[Volume(mount="/data", claim="new", size_gib=1)])
        backend.launch(PodSpec(), 2, context)
        (claim,) = place.plane.items("persistentvolumeclaims")
        assert (claim["metadata"]["name"], claim["status"]["phase"]) == ("new", "Bound")
        backend.stop()
        assert place.left(context) == []
    finally:
        place.plane.ask("DELETE", "/api/v1/persistentvolumes/disk")


def test_with_the_first_pod_all_goes(
    launched: Launched, place: RealKubernetesPlace, context: LaunchContext
) -> None:
    assert len(place.seen()) == 4
    (first,) = [line.split()[1] for line in place.seen() if line.endswith("-0")]
    place.plane.delete("pods", first)
    until(lambda: place.seen() == [], 60, every_s=0.1, why=place.seen)
    until(lambda: {pod.phase for pod in launched.backend.refresh()} == {Phase.FAILED})
    words = launched.backend.refresh()[0].message
    assert re.match(r"it was deleted at \d\d:\d\d:\d\d, not by this cluster", words)


def test_a_pod_that_was_deleted_is_replaced_under_the_run(
    place: RealKubernetesPlace, tmp_path: Path
) -> None:
    with Cluster(
        place.backend(), PodSpec(), count=2, path=tmp_path / "cluster", warm=False
    ) as cluster:
        run = counting(cluster, "--lines", "300", "--pause-s", "0.05", restarts=1)
        wait_for_lines(run)
        (second,) = [line.split()[1] for line in place.seen() if line.endswith("-1")]
        place.plane.delete("pods", second)
        result = run.wait(300, progress=False).raise_for_status()
        (restart,) = result.restarts
        assert restart.what == "pod-1 was lost"


def test_a_server_that_is_killed_and_comes_again_costs_no_run(
    place: RealKubernetesPlace, tmp_path: Path
) -> None:
    with Cluster(
        place.backend(), PodSpec(), count=2, path=tmp_path / "cluster", warm=False
    ) as cluster:
        run = counting(cluster, "--lines", "200", "--pause-s", "0.05")
        wait_for_lines(run)
        place.plane.kill_server()
        until(
            lambda: all("does not answer" in pod.message for pod in cluster.pods),
            60,
            why=lambda: cluster.pods,
        )
        assert {pod.phase for pod in cluster.pods} == {Phase.RUNNING}
        place.plane.start_server()
        run.wait(300, progress=False).raise_for_status()
        exact(run, 200)
        until(lambda: {pod.message for pod in cluster.pods} == {""}, 60, why=lambda: cluster.pods)
        context = LaunchContext(cluster_id="", directory=cluster.path, public_key="")
    assert place.left(context) == []


def test_a_start_that_fails_while_the_server_is_away_forgets_nothing(
    place: RealKubernetesPlace, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeapi, "_PATIENCE_S", 0.5)

    def report(line: str) -> None:
        if "Unschedulable" in line and alive:
            alive.clear()
            place.plane.kill_server()

    alive = [True]
    backend = place.backend()
    words = sentence("Call the cluster's close() again once the server answers")
    # The scheduler may need some time to find a server again that an earlier test killed.
    short = replace(context, timeout_s=25.0, report=report)
    try:
        with pytest.raises(PodTimeout, match=words):
            backend.launch(PodSpec(gpus=8), 2, short)
        record = note_of(context.directory, RECORD)
        with pytest.raises(BackendError, match=words):
            backend.stop()
        assert record.exists()
    finally:
        if not alive:
            place.plane.start_server()
    assert sorted(line.split()[0] for line in place.seen()) == ["Pod", "Pod", "Secret", "Service"]
    remove_left(backend.to_dict(), context.directory)
    assert place.left(context) == []
    assert not record.exists()
    backend.stop()


def test_a_lost_node_is_named_and_found_again(
    launched: Launched, place: RealKubernetesPlace
) -> None:
    place.kubelet.silent = True
    until(
        lambda: {pod.phase for pod in launched.backend.refresh()} == {Phase.UNKNOWN},
        90,
        why=launched.backend.refresh,
    )
    for pod in launched.backend.refresh():
        assert pod.message.startswith("its node node-1 is not ready since 20")
    place.kubelet.silent = False
    until(
        lambda: {pod.phase for pod in launched.backend.refresh()} == {Phase.RUNNING},
        60,
        why=launched.backend.refresh,
    )


def test_nodes_are_shown_as_far_as_the_account_may(place: RealKubernetesPlace) -> None:
    asked = PodSpec(cpus=8, memory_gib=64)
    words = "this account may not list nodes; docker/kubernetes/nodes/role.yaml is the ClusterRole"
    assert workbench.places.nodes(place.backend(), pod=asked, count=3).verdict.startswith(words)
    made = list(yaml.safe_load_all((MANIFESTS / "nodes" / "role.yaml").read_text()))
    for manifest in made:
        place.plane.create(manifest)
    try:
        table = workbench.places.nodes(place.backend(), pod=asked, count=3)
        (node,) = table.nodes
        assert (node.name, node.fits, table.schedulable) == ("node-1", 4, 4)
    finally:
        for manifest in made:
            place.plane.remove(manifest)
