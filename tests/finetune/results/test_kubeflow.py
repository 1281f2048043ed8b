"""A run as a job of Kubeflow: its manifests against the models of Kubeflow and of Kubernetes."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml

from tests.fakes.kubeplace import MANIFESTS
from tests.support.sentences import says, sentence
from tests.support.tinyfolders import llama
from workbench.base.errors import ConfigError
from workbench.base.files import write_json
from workbench.client.run import Run
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.finetune.methods.rows import columns_of
from workbench.handover.kubeflow.kinds import KINDS, ManifestKind
from workbench.handover.kubeflow.manifest import Manifest
from workbench.jobs.job import Job
from workbench.jobs.script import Script
from workbench.pods.kubernetes.pods import KubernetesPods
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec

IMAGE = "example.org/worker:1"
EVERYTHING: dict[str, Any] = {
    "image": IMAGE,
    "namespace": "lab",
    "gpu_resource": "amd.com/gpu",
    "node_selector": {"gpu": "mi300"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
        }
    },
    "priority_class": "high",
    "service_account": "worker",
    "image_pull_secrets": ["registry"],
    "run_as_user": 1234,
    "shm_gib": 16,
    "pvc": "data",
    "volumes": [
        {"mount": "/models", "claim": "hub", "size_gib": 100, "hub_cache": True},
        {"mount": "/config", "config_map": "settings", "sub_path": "a.json"},
    ],
    "extra_resources": {"rdma/hca": 1},
    "capabilities": ["IPC_LOCK"],
    "labels": {"team": "nlp"},
    "annotations": {"note": "mine"},
    "queue": "gpus",
    "pod_group_label": "scheduling.x-k8s.io/pod-group",
    "port": 2022,
    "python": "/opt/venv/bin/python",
}


def run_of(
    folder: Path,
    job: Job,
    *,
    backend: Mapping[str, object] | None = None,
    count: int = 3,
    **pod: Any,
) -> Run:
    """A run that was asked for and has not begun."""
    spec = RunSpec(
        cluster=ClusterSpec(backend=backend or {"kind": "local"}, pods=PodSpec(**pod), count=count),
        job=job,
    )
    prepared = prepare_run(spec, root=folder / "run")
    write_json(prepared.paths.info, {"id": "20261121-140252-zero1-6c8c", "cluster": str(folder)})
    return Run.load(prepared.paths.root)


def parts(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The objects as plain JSON, by kind."""
    return {each["kind"]: each for each in json.loads(json.dumps(manifest.objects))}


def handed_spec(manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(parts(manifest)["ConfigMap"]["data"]["spec.json"])
    return found


def inputs(manifest: Manifest) -> dict[str, bytes]:
    packed = base64.b64decode(parts(manifest)["ConfigMap"]["binaryData"]["inputs.zip"])
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def templates(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = job["spec"]
    replicas = spec.get("pytorchReplicaSpecs") or spec.get("mpiReplicaSpecs") or {}
    return [replica["template"] for replica in replicas.values()]


def check_by_kubeflow(job: Mapping[str, Any]) -> None:
    """Read a job by Kubeflow's models and back: unknown fields get lost, wrong ones refused."""
    if job["kind"] == "TrainJob":
        from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

        read = TrainerV1alpha1TrainJob.from_dict(job)
        assert read is not None
        assert read.to_dict() == job
        return
    from kubeflow.training import models

    known = json.loads(json.dumps(job))
    build(models, f"KubeflowOrgV1{job['kind']}", known)


def build(models: Any, name: str, data: Mapping[str, Any]) -> object:
    """Make a model of kubeflow.training's; it refuses what is missing, and we what is unknown."""
    model = getattr(models, name)
    names = {key: attribute for attribute, key in model.attribute_map.items()}
    assert set(data) <= set(names), f"{name} knows no {set(data) - set(names)}"
    made = {}
    for key, value in data.items():
        inner = re.search(r"KubeflowOrgV1\w+", model.openapi_types[names[key]])
        if inner and model.openapi_types[names[key]] == inner[0]:
            value = build(models, inner[0], value)
        elif inner:
            value = {each: build(models, inner[0], item) for each, item in value.items()}
        made[names[key]] = value
    return model(**made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"image": IMAGE}, EVERYTHING], ids=["least", "everything"])
def test_every_object_is_valid(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    run = run_of(tmp_path, FineTune(technique="zero1", save_steps=5), gpus=2, memory_gib=64)
    found = parts(run.manifest(kind, **options, token_secret="hub"))
    job = found.popitem()[1]
    check_by_kubeflow(job)
    plain = list(found.values())
    plain += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **each}
        for each in templates(job)
    ]
    if kind == "trainjob":
        patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
            "replicatedJobs"
        ][0]
        pod = patch["template"]["spec"]["template"]["spec"]
        pod["containers"] = [
            {**pod["containers"][0], "image": IMAGE, "env": job["spec"]["trainer"]["env"]}
        ]
        plain.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod})
    for each in plain:
        kubernetes_validate.validate(each, "1.37", strict=True)
    claim = "hub" if "pvc" in options else "20261121-140252-zero1-6c8c"
    assert [each["kind"] for each in plain[:2]] == ["ConfigMap", "PersistentVolumeClaim"]
    assert claim in plain[1]["metadata"]["name"]
    if "volumes" in options:
        assert plain[1]["spec"]["accessModes"] == ["ReadWriteMany"]
        for each in (each for each in plain if each["kind"] == "Pod"):
            (container,) = each["spec"]["containers"]
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert mounts["/config"] == {
                "name": "volume-1",
                "mountPath": "/config",
                "readOnly": True,
                "subPath": "a.json",
            }
            hub = {"name": mounts["/models"]["name"], "persistentVolumeClaim": {"claimName": "hub"}}
            assert hub in each["spec"]["volumes"]
            assert {"name": "HF_HOME", "value": "/models"} in container["env"]
            assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_policy_selects_every_pod(tmp_path: Path, kind: str) -> None:
    """It goes by a label of the pods; one of the job alone selects nothing."""
    (policy, *_) = yaml.safe_load_all((MANIFESTS / "networkpolicy.yaml").read_text())
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    made = parts(run_of(tmp_path, FineTune(technique="zero1")).manifest(kind, image=IMAGE))
    job = list(made.values())[-1]
    pods = templates(job)
    if kind == "trainjob":
        patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
            "replicatedJobs"
        ][0]
        pods = [patch["template"]["spec"]["template"]]
    assert pods
    for pod in pods:
        assert pod["metadata"]["labels"].items() >= wanted.items()


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_gets_a_token_or_may_write_its_image(tmp_path: Path, kind: str) -> None:
    made = parts(run_of(tmp_path, FineTune(technique="zero1")).manifest(kind, image=IMAGE))
    job = list(made.values())[-1]
    pods = [each["spec"] for each in templates(job)]
    if kind == "trainjob":  # which cannot say it of its pods
        patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
            "replicatedJobs"
        ][0]
        pods = [patch["template"]["spec"]["template"]["spec"]]
        account = made["ServiceAccount"]
        assert account["automountServiceAccountToken"] is False
        assert account["metadata"]["name"] == pods[0]["serviceAccountName"]
    else:
        assert [pod["automountServiceAccountToken"] for pod in pods] == [False] * len(pods)
    for container in (container for pod in pods for container in pod["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"/tmp", "/results"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_a_trainjob_of_anothers_account_tells_of_its_token(tmp_path: Path) -> None:
    manifest = run_of(tmp_path, FineTune()).manifest(
        "trainjob", image=IMAGE, service_account="mine"
    )
    assert "ServiceAccount" not in parts(manifest)
    assert says(manifest, "unless the account itself says automountServiceAccountToken", "mine")


def test_the_models_would_see_a_wrong_field(tmp_path: Path) -> None:
    run = run_of(tmp_path, FineTune())
    for kind, path in {
        "trainjob": "trainer",
        "pytorchjob": "runPolicy",
    }.items():
        job = list(parts(run.manifest(kind, image=IMAGE)).values())[-1]
        job["spec"][path]["noSuchField"] = 1
        with pytest.raises(AssertionError):
            check_by_kubeflow(job)


@pytest.mark.parametrize(("kind", "nodes"), [("trainjob", 3), ("pytorchjob", 3)])
def test_nodes_ranks_and_resources_are_those_of_the_run(
    tmp_path: Path, kind: str, nodes: int
) -> None:
    run = run_of(tmp_path, FineTune(technique="zero1"), cpus=8, gpus=2, memory_gib=64)
    manifest = run.manifest(kind, image=IMAGE, gpu_resource="amd.com/gpu")
    assert (manifest.nodes, manifest.slots) == (nodes, 2)
    spec = parts(manifest)[{"trainjob": "TrainJob", "pytorchjob": "PyTorchJob"}[kind]]["spec"]
    wanted = {"cpu": "8000m", "memory": "65536Mi", "amd.com/gpu": "2"}
    if kind == "trainjob":
        assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (3, 2)
        assert spec["runtimeRef"]["name"] == "torch-distributed"
        assert spec["trainer"]["resourcesPerNode"]["limits"] == wanted
    else:
        replicas = spec["pytorchReplicaSpecs"]
        assert [each["replicas"] for each in replicas.values()] == [1, 2]
        assert spec["nprocPerNode"] == "2"
        container = replicas["Worker"]["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"] == wanted
        assert "--nnodes=3" in container["command"]


def test_the_job_is_the_runs_own(tmp_path: Path) -> None:
    job = FineTune(
        technique="zero3",
        max_steps=7,
        learning_rate=0.5,
        seed=11,
        launcher="pdsh",
        env={"NCCL_DEBUG": "INFO"},
    )
    run = run_of(tmp_path, job, env={"HF_HOME": "/results/hub"})
    plain = {"HF_HOME": "/results/hub", "NCCL_DEBUG": "INFO"}
    manifest = run.manifest("pytorchjob", image=IMAGE, env=plain)
    spec = handed_spec(manifest)
    assert (spec["cluster"]["count"], spec["cluster"]["pods"]["env"]) == (
        3,
        {"HF_HOME": "${HF_HOME}"},
    )
    worker = parts(manifest)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"][
        "spec"
    ]
    assert (
        plain.items()
        <= {each["name"]: each.get("value") for each in worker["containers"][0]["env"]}.items()
    )
    with pytest.raises(ConfigError, match=sentence("and a manifest is read by many", "MY_TOKEN")):
        run.manifest("pytorchjob", image=IMAGE, env={**plain, "MY_TOKEN": "abcd1234"})
    asked = {
        **job.to_dict(),
        "precision": "fp32",
        "launcher": "ssh",
        "env": {"NCCL_DEBUG": "${NCCL_DEBUG}"},
    }
    assert spec["job"].pop("deepspeed")["zero_optimization"]["stage"] == 3
    del asked["deepspeed"]
    assert spec["job"] == json.loads(json.dumps(asked))
    (tmp_path / "spec.json").write_text(parts(manifest)["ConfigMap"]["data"]["spec.json"])
    assert RunSpec.load(tmp_path / "spec.json").job.env == {"NCCL_DEBUG": "${NCCL_DEBUG}"}


def test_rows_and_scripts_travel_if_they_are_small(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"source": f"q{n}", "target": "a"}) + "\n" for n in range(50))
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    data = {
        "kind": "files",
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
    }
    manifest = run_of(tmp_path / "rows", FineTune(dataset=data)).manifest("trainjob", image=IMAGE)
    assert handed_spec(manifest)["job"]["dataset"] == {
        "kind": "files",
        "train": "train.jsonl",
        "eval": "eval.jsonl",
    }
    assert sorted(inputs(manifest)) == ["eval.jsonl", "train.jsonl"]

    (tmp_path / "scores.py").write_text("def score(predictions, references): ...\n")
    measured = FineTune(dataset=data, metrics=[f"{tmp_path}/scores.py:score"])
    manifest = run_of(tmp_path / "measured", measured).manifest("trainjob", image=IMAGE)
    assert handed_spec(manifest)["job"]["metrics"] == ["metric-1.py:score"]
    assert inputs(manifest)["metric-1.py"] == (tmp_path / "scores.py").read_bytes()


def test_the_rows_and_rewards_of_a_method_travel_and_are_read_again(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"q{n}", "answer": str(n)}) + "\n" for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "judge.py").write_text("def judge(completions, answer): ...\n")
    job = FineTune(
        model="tiny-llama",
        method="grpo",
        dataset=str(tmp_path / "rows.jsonl"),
        rewards=[f"{tmp_path}/judge.py:judge"],
    )
    manifest = run_of(tmp_path / "run", job).manifest("trainjob", image=IMAGE)
    handed = handed_spec(manifest)["job"]
    assert handed["rewards"] == ["reward-1.py:judge"]
    assert inputs(manifest)["reward-1.py"] == (tmp_path / "judge.py").read_bytes()
    # What was prepared here is read as it is on the cluster.
    line = json.loads(inputs(manifest)["train.jsonl"].splitlines()[0])
    example = method_of("grpo").rows.read(line, "line 1")
    assert example.source.startswith("q") and columns_of(example)["answer"] in example.source

    own = tmp_path / "own"
    own.mkdir()
    (own / "train.py").write_text("import helper\n")
    (own / "helper.py").write_text("")
    run = run_of(tmp_path / "script", Script(path=str(own / "train.py"), args=["--lr", "a b"]))
    manifest = run.manifest("pytorchjob", image=IMAGE)
    assert (handed_spec(manifest)["job"]["path"], handed_spec(manifest)["job"]["args"]) == (
        "own/train.py",
        ["--lr", "a b"],
    )
    assert sorted(inputs(manifest)) == ["helper.py", "train.py"]

    module = Script(module="own.train", folder=str(tmp_path))
    (tmp_path / ".workbenchignore").write_text("/script/\n/module/\n")
    job = handed_spec(run_of(tmp_path / "module", module).manifest("pytorchjob", image=IMAGE))[
        "job"
    ]
    assert (job["module"], job["folder"], job["path"]) == (
        "own.train",
        tmp_path.name,
        f"{tmp_path.name}/own/train.py",
    )

    assert "It carries the script's folder (2 files, 14 bytes)." in manifest.notes
    (own / "train.py").write_text("another one by now\n")
    assert inputs(run.manifest("pytorchjob", image=IMAGE))["train.py"] == b"import helper\n"

    RunPaths(run.path).script.unlink()
    with pytest.raises(
        ConfigError,
        match=sentence("does not hold the script of the run", "script='FOLDER/train.py"),
    ):
        run.manifest("pytorchjob", image=IMAGE)
    again = run.manifest("pytorchjob", image=IMAGE, script=str(own / "train.py"))
    assert inputs(again)["train.py"] == b"another one by now\n"

    (own / "noise.bin").write_bytes(random.Random(0).randbytes(1 << 20))
    run = run_of(tmp_path / "large", Script(path=str(own / "train.py")))
    with pytest.raises(
        ConfigError,
        match=sentence("into a folder of the claim and name claim and folder")
        + sentence("its folder as", "'script/own'"),
    ):
        run.manifest("pytorchjob", image=IMAGE)
    large = run.manifest("pytorchjob", image=IMAGE, pvc="data", inputs="mine/v1")
    assert handed_spec(large)["job"]["path"] == "/results/mine/v1/script/own/train.py"
    assert "inputs.zip" not in parts(large)["ConfigMap"]["binaryData"]


def test_settings_come_from_the_pods_of_the_run_unless_told(tmp_path: Path) -> None:
    backend = KubernetesPods(**EVERYTHING, secrets={"HF_TOKEN": "hub/token"})
    run = run_of(tmp_path, FineTune(technique="ddp"), backend=backend.to_dict())
    job = parts(run.manifest("pytorchjob"))["PyTorchJob"]
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert job["metadata"]["namespace"] == "lab"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod["metadata"] == {
        "labels": {
            "team": "nlp",
            "app.kubernetes.io/managed-by": "deepspeed-workbench",
            "scheduling.x-k8s.io/pod-group": job["metadata"]["name"],
        },
        "annotations": {
            "note": "mine",
            "karpenter.sh/do-not-disrupt": "true",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        },
    }
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"gpu": "mi300"}, "high")
    assert (spec["serviceAccountName"], spec["imagePullSecrets"]) == (
        "worker",
        [{"name": "registry"}],
    )
    assert spec["securityContext"]["runAsUser"] == 1234
    assert {"name": "results", "persistentVolumeClaim": {"claimName": "data"}} in spec["volumes"]
    assert container["command"][0] == "/opt/venv/bin/python"
    told = container["env"][-1]
    assert told == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    }
    other = parts(run.manifest("pytorchjob", namespace="prod", pvc="", node_selector={}))[
        "PyTorchJob"
    ]
    assert other["metadata"]["namespace"] == "prod"
    assert "nodeSelector" not in other["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def test_a_secret_is_never_in_it(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, FineTune(env={"WANDB_API_KEY": "canary-5f1e"}), env={"HF_TOKEN": "canary-77aa"}
    )
    with pytest.raises(
        ConfigError,
        match=sentence(
            "or give what is no secret with env=",
            "HF_TOKEN, WANDB_API_KEY",
            "token_secret='hub'",
        ),
    ):
        run.manifest("pytorchjob", image=IMAGE)
    with pytest.raises(ConfigError, match=r'secrets=\{"WANDB_API_KEY": "secret/key"\}'):
        run.manifest("pytorchjob", image=IMAGE, token_secret="hub")
    manifest = run.manifest(
        "pytorchjob", image=IMAGE, token_secret="hub/t", secrets={"WANDB_API_KEY": "wb/key"}
    )
    assert "canary" not in f"{manifest}{manifest!r}{manifest._repr_html_()}"
    spec = handed_spec(manifest)
    assert spec["cluster"]["pods"]["env"] == {"HF_TOKEN": "${HF_TOKEN}"}
    job = parts(manifest)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    master = job["Master"]["template"]["spec"]["containers"][0]
    references = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in master["env"]
        if "valueFrom" in each
    }
    assert references == {
        "HF_TOKEN": {"name": "hub", "key": "t"},
        "WANDB_API_KEY": {"name": "wb", "key": "key"},
    }
    assert says(manifest, "create secret generic", "hub", "t")


def test_elastic_is_for_what_can_be(tmp_path: Path) -> None:
    run = run_of(tmp_path / "ddp", FineTune(technique="ddp", save_steps=0), gpus=2)
    job = parts(run.manifest("pytorchjob", image=IMAGE, elastic=(2, 4)))["PyTorchJob"]
    check_by_kubeflow(job)
    policy = {"minReplicas": 2, "maxReplicas": 4, "maxRestarts": 3, "rdzvBackend": "c10d"}
    assert job["spec"]["elasticPolicy"] == policy
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 4
    assert not [
        word for word in worker["template"]["spec"]["containers"][0]["command"] if "nnodes" in word
    ]
    with pytest.raises(
        ConfigError,
        match=sentence("elastic is a policy of PyTorchJobs", "trainjob"),
    ):
        run.manifest("trainjob", image=IMAGE, elastic=(2, 4))
    assert says(
        run.manifest("pytorchjob", image=IMAGE, elastic=(2, 4)),
        "When nodes come or go, all ranks {}, as many as there are then.",
        "begin again",
    )
    for technique in ("zero2", "fsdp"):
        other = run_of(tmp_path / technique, FineTune(technique=technique, save_steps=2))
        assert says(
            other.manifest("pytorchjob", image=IMAGE, elastic=(2, 4)),
            "continue from the last checkpoint",
        ) and says(
            other.manifest("pytorchjob", image=IMAGE, elastic=(2, 4)),
            "When nodes come or go, all ranks {}, as many as there are then.",
        )
    for technique, why in {
        "local-sgd": "each rank of local-sgd has weights of its own",
        "single": "one proc",
    }.items():
        other = run_of(tmp_path / technique, FineTune(technique=technique))
        with pytest.raises(
            ConfigError, match=f"technique '{technique}' cannot be elastic: .*{why}"
        ):
            other.manifest("pytorchjob", image=IMAGE, elastic=(2, 4))
    spread = run_of(tmp_path / "spread", FineTune(technique="single", device_map="auto"), gpus=2)
    with pytest.raises(
        ConfigError, match=sentence("device_map spreads a model over the GPUs of a single process")
    ):
        spread.manifest("trainjob", image=IMAGE)


def test_started_again_only_where_it_goes_on(tmp_path: Path) -> None:
    for every, policy, limit in ((5, "OnFailure", 3), (None, "OnFailure", 3), (0, "Never", 0)):
        run = run_of(tmp_path / str(every), FineTune(technique="zero1", save_steps=every))
        spec = parts(run.manifest("pytorchjob", image=IMAGE))["PyTorchJob"]["spec"]
        assert spec["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == policy
        assert spec["runPolicy"]["backoffLimit"] == limit


@pytest.mark.parametrize(("restarts", "policy"), [(0, "Never"), (7, "OnFailure")])
@pytest.mark.parametrize("every", [5, 0])
def test_a_given_number_of_restarts_holds_for_every_job(
    tmp_path: Path, restarts: int, policy: str, every: int
) -> None:
    run = run_of(tmp_path / "run", FineTune(technique="zero1", save_steps=every))
    manifest = run.manifest("pytorchjob", image=IMAGE, restarts=restarts)
    spec = parts(manifest)["PyTorchJob"]["spec"]
    assert spec["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == policy
    assert spec["runPolicy"]["backoffLimit"] == restarts
    begin = "continue from the last checkpoint" if every else "begin again"
    note = f"Ranks that fail are started again and {begin}."
    assert (note in manifest.notes) == bool(restarts)
    elastic = run.manifest("pytorchjob", image=IMAGE, restarts=restarts, elastic=(2, 4))
    policy_of = parts(elastic)["PyTorchJob"]["spec"]["elasticPolicy"]
    assert policy_of["maxRestarts"] == restarts
    with pytest.raises(ConfigError, match="restarts is an option of PyTorchJobs; the runtime"):
        run.manifest("trainjob", image=IMAGE, restarts=restarts)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            "pytorch",
            {"image": IMAGE},
            sentence(
                "is not known",
                "manifest kind 'pytorch'",
                "pytorchjob",
                "trainjob",
            )
            + sentence(": did you mean '{}'?"),
        ),
        ("trainjob", {}, sentence("a manifest needs the image of its containers")),
        (
            "trainjob",
            {"imag": IMAGE},
            sentence("option {} is not known", "manifest", "imag", "image")
            + sentence(": did you mean '{}'?"),
        ),
        ("trainjob", {"image": IMAGE, "name": "Mine"}, "name is 'Mine'"),
        ("trainjob", {"image": IMAGE, "namespace": "L_ab"}, "namespace is 'L_ab'"),
        (
            "trainjob",
            {"image": IMAGE, "inputs": "/data"},
            sentence("inputs is {}; give a folder on the claim, as in 'data/wikisql'", "/data"),
        ),
        (
            "trainjob",
            {"image": IMAGE, "token_secret": "hf_XYZ"},
            sentence("token_secret is not the name of a Secret"),
        ),
        (
            "pytorchjob",
            {"image": IMAGE, "elastic": (3, 2)},
            sentence("elastic is {}; give the least and the most nodes, as in (2, 4)", "3, 2"),
        ),
        ("pytorchjob", {"image": IMAGE, "elastic": 3}, "elastic is 3"),
        ("trainjob", {"image": IMAGE, "storage_gib": 0}, "storage_gib is 0"),
        (
            "trainjob",
            {"image": IMAGE, "connect_timeout_s": 30},
            sentence("as nothing is sent to the cluster"),
        ),
        (
            "pytorchjob",
            {"image": IMAGE, "pull_timeout_s": 60},
            sentence("as nothing is sent to the cluster"),
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], words: str
) -> None:
    run = run_of(tmp_path, FineTune(technique="ddp"))
    with pytest.raises(ConfigError, match=words) as error:
        run.manifest(kind, **options)
    assert "hf_XYZ" not in str(error.value), "somebody gave the token itself"


def test_what_lies_on_this_machine_is_refused(tmp_path: Path) -> None:
    model = llama(tmp_path / "model")
    run = run_of(tmp_path / "a", FineTune(model=str(model)))
    with pytest.raises(
        ConfigError, match=sentence("copy the folder to the claim as 'model", "/model")
    ):
        run.manifest("trainjob", image=IMAGE)
    assert (
        handed_spec(run.manifest("trainjob", image=IMAGE, inputs="x"))["job"]["model"]
        == "/results/x/model"
    )
    resumed = run_of(tmp_path / "b", FineTune())
    spec = json.loads(resumed.paths.spec.read_text())
    write_json(resumed.paths.spec, {**spec, "job": {**spec["job"], "resume": "/old"}})
    with pytest.raises(
        ConfigError, match=sentence("a folder of this machine that no cluster can read", "/old")
    ):
        resumed.manifest("trainjob", image=IMAGE)
    stored = {**spec, "job": {**spec["job"], "checkpoints": "s3://bucket/runs"}}
    write_json(resumed.paths.spec, stored)
    with pytest.raises(
        ConfigError, match="checkpoints go to s3://bucket/runs, and only the keeper"
    ):
        resumed.manifest("trainjob", image=IMAGE)


def test_it_shows_itself(tmp_path: Path) -> None:
    manifest = run_of(tmp_path, FineTune()).manifest("pytorchjob", image="<b>&x")
    name = "wb-20261121-140252-zero1-6c8c"
    assert (
        repr(manifest)
        == f"Manifest(pytorchjob {name}, 3 x 1 ranks of <b>&x, results in {name}-results:/{name})"
    )
    page = manifest._repr_html_()
    assert "&lt;b&gt;&amp;x" in page
    assert "<b>" not in page
    assert len(page) < 40_000 < len(str(manifest)), "the package itself is not for the eye"
    file = manifest.to_yaml(tmp_path / "job.yaml")
    assert file.read_text() == str(manifest)
    assert list(yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader)) == list(
        parts(manifest).values()
    )
    with pytest.raises(
        ConfigError,
        match=sentence("cannot write the manifest", "no/job.yaml", "No such file"),
    ):
        manifest.to_yaml(tmp_path / "no" / "job.yaml")


def test_a_configmap_takes_the_package_and_leaves_room(tmp_path: Path) -> None:
    config = parts(run_of(tmp_path, FineTune()).manifest("trainjob", image=IMAGE))["ConfigMap"]
    package = base64.b64decode(config["binaryData"]["workbench.zip"])
    assert len(package) < 800 << 10
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        assert {
            "workbench/handover/unattended/__main__.py",
            "workbench/finetune/train/main.py",
        } <= set(archive.namelist())


def test_editors_know_every_kind_of_manifest() -> None:
    assert set(get_args(ManifestKind)) == set(KINDS)
