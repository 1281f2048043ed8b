"""A script with the Trainer of transformers: its model is there afterwards, and its figures in panel and history."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from workbench import Cluster, LocalPods, PodSpec, Script, history
from workbench.results.tensorboard.board import board_folder

pytestmark = pytest.mark.long
SCRIPTS = Path(__file__).parent.parent / "scripts"
ZERO = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}


def test_its_model_and_its_figures_are_there_through_ssh_and_through_deepspeed_and_pdsh(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(SCRIPTS / "trainer.py", folder)
    (folder / "zero.json").write_text(json.dumps(ZERO))
    plain = Script(folder / "trainer.py")
    losses: list[list[float]] = []
    with Cluster(LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path / "c", warm=False) as cluster:
        for job in (plain, plain.replace(args=["zero.json"], launcher="pdsh")):
            run = cluster.submit(job)
            result = run.wait(600, progress=False).raise_for_status()
            out = run.paths.outputs
            assert (out / "final" / "model.safetensors").stat().st_size > 10_000
            assert (out / "out" / "checkpoint-4" / "trainer_state.json").exists()
            state = json.loads((out / "out" / "checkpoint-4" / "trainer_state.json").read_text())
            logged = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
            steps = [event for event in run.events() if event.kind == "step"]
            assert [(event.rank, event.data["step"], event.data["max_steps"]) for event in steps] == [
                (0, 2, 4), (0, 4, 4),
            ]  # fmt: skip
            assert [event.data["loss"] for event in steps] == logged
            assert all(float(str(event.data["samples_per_s"])) > 0 for event in steps)
            assert (result.steps, result.eval_loss, result.first_eval_loss) == (4, run.progress.eval_loss, None)
            assert None not in (result.train_loss, result.train_samples_per_s, result.train_runtime_s, result.eval_loss)
            assert history(run.path).records[0].eval_loss == result.eval_loss
            assert "notebook is not told" not in run.logs(0, "stderr")
            assert board_folder(run.paths) == run.path, "its own event files are shown beside ours"
            losses.append(logged)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
