"""Trainings at other places: notebook 03 as it stands on Kubernetes, and a job on SSH hosts.

A notebook moves to another place by its first cell alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.pods.conftest import PLACES
from workbench import Cluster, FineTune, PodSpec
from workbench.base.process import with_mark
from workbench.client.run import Run
from workbench.pods.pod import LaunchContext

pytestmark = [pytest.mark.slow, pytest.mark.long]
PODS = 2  # on a host each, every rank imports for itself; the notebook's third pod adds nothing
NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "03_deepspeed_zero1.ipynb"


def test_notebook_three_goes_elsewhere_by_its_first_cell_alone(tmp_path: Path) -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    head, tail = first.source.partition("train_rows")[::2]
    assert "backend = LocalPods()\npod = PodSpec(cpus=1)\ncount = 3\n" in head
    assert "max_steps = 12" in tail
    with PLACES["kubernetes"](tmp_path / "place") as place:
        backend = place.backend()
        name = type(backend).__name__
        options = {key: value for key, value in backend.to_dict().items() if key != "kind"}
        first.source = (
            f"from workbench import Cluster, FineTune, PodSpec, {name}\n\n"
            f"backend = {name}(**{options!r})\npod = PodSpec(cpus=1)\ncount = {PODS}\n"
            f"train_rows{tail.replace('max_steps = 12', 'max_steps = 2')}"
        )
        done = NotebookClient(
            book, timeout=560, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
        outputs = [out for cell in done.cells for out in cell.get("outputs", [])]
        text = "\n".join(out.get("data", {}).get("text/plain", "") for out in outputs)
        (cluster,) = (tmp_path / "runs").iterdir()
        assert place.left(LaunchContext(cluster_id="", directory=cluster, public_key="")) == []
    assert re.search(r"^launcher +ssh +pdsh", text, re.MULTILINE), text
    runs = [Run.load(folder) for folder in sorted((cluster / "runs").iterdir())]
    assert sorted((run.result.technique, run.result.launcher) for run in runs) == [
        ("ddp", "ssh"),
        ("zero1", "pdsh"),
    ]
    assert len({round(run.result.train_loss, 4) for run in runs}) == 1
    for run in runs:
        result = run.result.raise_for_status()
        told = json.loads(run.paths.result.read_text())["hosts"]
        pods = json.loads((cluster / "state.json").read_text())["pods"]
        assert (result.world_size, [host["address"] for host in told]) == (
            PODS,
            [pod["address"] for pod in pods],
        )
        assert (run.path / "model" / "model.safetensors").stat().st_size > 1000
        assert with_mark("WORKBENCH_POD", [pod["root"] for pod in pods]) == []


def test_a_training_on_two_hosts_starts_from_the_hostfile_and_leaves_its_model(
    tmp_path: Path,
) -> None:
    job = FineTune(
        dataset={"kind": "wikisql-mini", "train_rows": 40, "eval_rows": 4},
        technique="zero1",
        launcher="pdsh",
        max_steps=2,
        per_device_train_batch_size=2,
        predict_rows=0,
        profile_step=0,
    )
    with (
        PLACES["ssh"](tmp_path / "place") as place,
        Cluster(
            place.backend(), PodSpec(), count=PODS, path=tmp_path / "cluster", warm=False
        ) as cluster,
    ):
        run = cluster.submit(job)
        result = run.wait(300, progress=False).raise_for_status()
    assert (result.world_size, result.steps, result.launcher) == (PODS, 2, "pdsh")
    assert (run.path / "model" / "model.safetensors").stat().st_size > 1000
