"""A spec with anything in any place is refused in words or starts: no traceback, no remains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import tries
from tests.support.wrong import WRONG, inner, places, replaced
from workbench import cli
from workbench.base.errors import ConfigError
from workbench.client.cluster import Cluster
from workbench.finetune.job.finetune import FineTune
from workbench.jobs.script import Script
from workbench.pods.backends import backend_from_dict
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

BACKENDS: tuple[dict[str, object], ...] = (
    {"kind": "local"},
    {
        "kind": "ssh",
        "hosts": ["gpu-1", {"address": "10.0.0.2", "user": "me", "slots": 2}],
        "trust": {"gpu-1": "SHA256:" + "A" * 43},
    },
    {"kind": "kubernetes", "image": "worker:1", "namespace": "lab"},
    {"kind": "cml", "cpu": 2, "memory_gib": 8},
)


def base_specs(folder: Path) -> list[dict[str, Any]]:
    script = folder / "script" / "train.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    jobs = (
        FineTune(dataset={"kind": "wikisql-mini", "train_rows": 8, "eval_rows": 4}, env={"A": "b"}),
        FineTune(
            technique="fsdp",
            peft="lora",
            lora={"r": 4},
            fsdp={"shard": "full"},
            model="tiny-llama",
            max_steps=3,
        ),
        FineTune(deepspeed={"zero_optimization": {"stage": 1}}, resume=None, report_to=["wandb"]),
        Script(path=str(script), args=["--a", "b"], env={"A": "b"}),
    )
    specs = []
    for job, backend in zip(jobs, BACKENDS, strict=True):
        cluster = ClusterSpec.from_dict(
            {"backend": backend, "count": 2, "pods": {"cpus": 2, "env": {"B": "c"}}}
        )
        made = RunSpec(cluster=cluster, job=job).to_dict()
        made["cluster"] = {**made["cluster"], "backend": {**spelled_out(backend), **backend}}  # type: ignore[dict-item]
        specs.append(json.loads(json.dumps(made)))
    return specs


def spelled_out(backend: dict[str, object]) -> dict[str, object]:
    try:
        return backend_from_dict(backend).to_dict()
    except ConfigError:
        return {}


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "put", "drop", "add", "rename", "deep")),
        st.integers(0, 10**6),
        st.sampled_from(WRONG),
    ),
    min_size=1,
    max_size=2,
)


def mutated(spec: Any, how: str, where: int, wrong: object) -> Any:
    ways = list(places(spec))
    at = ways[where % len(ways)]
    parent = inner(spec, at[:-1])
    match how:
        case "put":
            return replaced(spec, at, wrong)
        case "deep":
            deep: object = wrong
            for _ in range(where % 400):
                deep = [deep] if where % 2 else {"a": deep}
            return replaced(spec, at, deep)
        case "drop" | "rename" if at and isinstance(parent, dict):
            kept = {key: value for key, value in parent.items() if key != at[-1]}
            return replaced(
                spec, at[:-1], kept if how == "drop" else {**kept, f"{at[-1]}x": parent[at[-1]]}
            )
        case "add" if isinstance(inner(spec, at), dict):
            return replaced(spec, at, {**inner(spec, at), "added": wrong})
    return spec


def refusal(file: Path, out: Path) -> str:
    """What refuses a spec before anything starts, as `workbench run` does; empty if none."""
    try:
        spec = RunSpec.load(file)
        prepared = prepare_run(spec, root=out)
        Cluster.from_spec(spec.cluster, path=prepared.paths.root / "cluster")
    except ConfigError as error:
        assert len(str(error)) > 10
        return str(error)
    return ""


def tried(
    folder: Path, examples: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    monkeypatch.setenv(
        "A", "b"
    )  # a spec that is written down holds names of variables, and no value
    monkeypatch.setenv("B", "c")
    specs, counts = base_specs(folder), [0, 0]
    file, out = folder / "spec.json", folder / "out"
    for spec in specs:
        file.write_text(json.dumps(spec))
        assert not refusal(file, out)
        shutil.rmtree(out)

    @tries(examples)
    @given(st.sampled_from(specs), MUTATIONS)
    def each(spec: Any, mutations: list[tuple[str, int, object]]) -> None:
        for mutation in mutations:
            spec = mutated(spec, *mutation)
        file.write_text(json.dumps(spec))
        counts[0] += 1
        refused = refusal(file, out)
        shutil.rmtree(out, ignore_errors=True)
        if not refused:
            return
        counts[1] += 1
        # What is refused before a pod is asked for never starts one.
        assert cli.main(["run", str(file), "--out", str(out)]) == 2
        assert capsys.readouterr().out.startswith("refused: ")
        assert not out.exists()

    each()
    return counts[0], counts[1]


def test_a_bad_spec_ends_in_words_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, refused = tried(tmp_path, 100, capsys, monkeypatch)
    assert seen >= 100
    assert refused > 50


def test_the_corrected_spec_of_a_refused_one_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "spec.json", tmp_path / "out"
    job = {"dataset": {"kind": "wikisql-mini", "train_rows": 8, "eval_rows": 4}}
    file.write_text(json.dumps({"cluster": {"backend": {"kind": "nope"}}, "job": job}))
    assert cli.main(["run", str(file), "--out", str(out)]) == 2
    assert "'nope' is not known" in capsys.readouterr().out
    assert not out.exists()
    file.write_text(json.dumps({"job": job}))
    assert not refusal(file, out)
