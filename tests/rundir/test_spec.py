import json
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.spec import ClusterSpec, RunSpec, expand_env, hide_values, stored

SPEC = {
    "cluster": {"backend": {"kind": "local"}, "pods": {"cpus": 1}, "count": 3},
    "job": {"technique": "zero3"},
}


def write(folder: Path, spec: object) -> Path:
    path = folder / "spec.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return path


def test_round_trip(tmp_path: Path) -> None:
    spec = RunSpec.load(write(tmp_path, SPEC))
    assert spec.cluster == ClusterSpec(pods=PodSpec(cpus=1), count=3)
    assert RunSpec.load(write(tmp_path, spec.to_dict())) == spec


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{", sentence("the spec {} is not JSON")),
        ({"cluster": {}}, sentence("needs the option", "job")),
        ({**SPEC, "jobs": {}}, sentence(": did you mean '{}'?", "job")),
        ({**SPEC, "cluster": {"counts": 3}}, sentence(": did you mean '{}'?", "count")),
        ({**SPEC, "cluster": {"count": 0}}, "count is 0"),
        (
            {**SPEC, "cluster": {"pods": {"cpu": 1}}},
            sentence(": did you mean '{}'?", "cpus"),
        ),
        (
            {**SPEC, "job": {"technique": "zero-1"}},
            sentence(": did you mean '{}'?", "zero1"),
        ),
        ({**SPEC, "job": {"launcher": "mpi"}}, "Allowed: ssh, pdsh, openmpi"),
        ({**SPEC, "job": {"per_device_train_batch_size": 0}}, "per_device_train_batch_size is 0"),
        (
            {**SPEC, "job": {"max_step": 3}},
            sentence(": did you mean '{}'?", "max_steps"),
        ),
        ({**SPEC, "pods": 0}, "pods is 0"),
        ([], sentence("is {}; it must be an object")),
    ],
)
def test_a_bad_spec_says_what_and_what_would_do(tmp_path: Path, spec: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunSpec.load(write(tmp_path, spec))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        RunSpec.load(tmp_path / "nowhere.json")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    job = {"dataset": {"kind": "files", "train": "train.jsonl", "eval": "missing.jsonl"}}
    spec = RunSpec.load(write(tmp_path, {"job": job}))
    assert isinstance(spec.job, FineTune)
    assert spec.job.dataset == {
        "kind": "files",
        "train": str(tmp_path / "train.jsonl"),
        "eval": "missing.jsonl",
    }


def test_no_value_is_written_and_whoever_submits_it_again_is_asked_for_all_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = PodSpec(env={"POD_LOGIN": "me:canary"})
    spec = RunSpec(
        cluster=ClusterSpec(pods=pods), job=FineTune(env={"HF_TOKEN": "canary", "MODE": "INFO"})
    )
    text = json.dumps(spec.to_dict())
    assert "canary" not in text
    assert "INFO" not in text
    again = RunSpec.load(write(tmp_path, text))
    for name in ("HF_TOKEN", "MODE", "POD_LOGIN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=sentence("env takes the values of", "HF_TOKEN, MODE")):
        expand_env(again.job.env)
    with pytest.raises(ConfigError, match="POD_LOGIN"):
        again.resolved()
    for name, value in (("HF_TOKEN", "canary"), ("MODE", "INFO"), ("POD_LOGIN", "me:canary")):
        monkeypatch.setenv(name, value)
    assert again.resolved() == spec


def test_reading_the_spec_of_somebody_else_resolves_no_variable_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    env = {"A": "${AWS_SECRET_ACCESS_KEY}", "B": "x-${AWS_SECRET_ACCESS_KEY}"}
    spec = RunSpec.load(write(tmp_path, {**SPEC, "job": {"env": env}}))
    assert "canary" not in repr(dict(spec.job.env))
    assert hide_values(spec.job.env) == {"A": "${AWS_SECRET_ACCESS_KEY}", "B": "${B}"}
    assert expand_env(spec.job.env) == {"A": "canary", "B": "x-canary"}


def test_a_value_of_the_environment_is_in_no_other_option_either() -> None:
    spec = {
        "cluster": {"pods": {"env": {"POD_TOKEN": "canary-of-pods"}}, "note": "canary-of-pods"},
        "job": {
            "env": {"TOKEN": "canary-of-job", "OTHER": "${HOME}"},
            "args": ["--token=canary-of-job", "canary-of-pods", "${HOME}"],
        },
    }
    written = stored(spec)
    assert "canary" not in json.dumps(written)
    assert written["job"]["args"][2] == "${HOME}", "a reference holds no secret"  # type: ignore[index]


@pytest.mark.parametrize(
    ("technique", "gpus", "pods", "ranks"),
    [("ddp", 0, None, 3), ("ddp", 4, None, 12), ("ddp", 4, 2, 8), ("single", 4, 2, 1)],
)
def test_a_run_has_a_rank_for_each_slot_of_its_pods(
    technique: str, gpus: int, pods: int | None, ranks: int
) -> None:
    cluster = ClusterSpec(pods=PodSpec(gpus=gpus), count=3)
    assert (
        RunSpec(cluster=cluster, job=FineTune(technique=technique), pods=pods).world_size == ranks
    )


@pytest.mark.parametrize(
    ("kind", "count", "communication"),
    [("ssh", 2, "bf16"), ("ssh", 1, None), ("local", 2, None)],
)
def test_gradients_are_halved_for_a_network_between_hosts_alone(
    kind: str, count: int, communication: str | None
) -> None:
    cluster = ClusterSpec(backend={"kind": kind}, count=count)
    assert cluster.chosen(FineTune(technique="ddp")).communication == communication


def test_local_pods_share_the_memory_of_the_machine_and_others_have_their_own() -> None:
    local, remote = ClusterSpec(), ClusterSpec(backend={"kind": "ssh"})
    whole = local.pod_memory_gib(1)
    assert whole is not None and local.pod_memory_gib(4) == pytest.approx(whole / 4)
    first = Path("/proc/meminfo").read_text().split()  # MemTotal: N kB
    assert whole == pytest.approx(int(first[1]) / 2**20, rel=0.01)
    assert remote.pod_memory_gib(2) is None
    for cluster in (local, remote):
        assert cluster.replace(pods=PodSpec(memory_gib=8)).pod_memory_gib(2) == 8.0


def test_patterns_and_lists_of_paths_are_relative_to_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "part-1.jsonl").touch()
    dataset = {"kind": "files", "train": "part-*.jsonl", "eval": "none-*.jsonl"}
    spec = RunSpec.load(write(tmp_path, {"job": {"dataset": dataset}}))
    assert isinstance(spec.job, FineTune)
    assert spec.job.dataset == {**dataset, "train": str(tmp_path / "part-*.jsonl")}
