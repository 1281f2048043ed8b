"""A built-in model has random weights, and every view that shows a chosen model says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.views import EXAMPLES, ended
from workbench.base.display_protocol import as_html, as_text
from workbench.client.run import Run
from workbench.display.compose.form import compose
from workbench.display.kit.doc import Doc, to_html, to_text
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook.result import FineTuneResult
from workbench.finetune.plan.gpus import GpuTable
from workbench.finetune.plan.plan import plan
from workbench.finetune.plan.reading import RowPreview

REMARK = "random weights, for trying only"
MODELS = {"tiny-t5": True, "tiny-llama": True, "t5-small": False}


def views(model: str, folder: Path) -> dict[str, object]:
    job = FineTune(model=model)
    preview = EXAMPLES[RowPreview](folder)
    gpus = EXAMPLES[GpuTable](folder)
    run = ended(folder)
    assert isinstance(preview, RowPreview)
    assert isinstance(gpus, GpuTable)
    result = run.result
    assert result is not None
    found: dict[str, object] = {
        "preview": replace(preview, job=job),
        "gpus_for": replace(gpus, job=job),
        "form": compose(model=model).doc(),
        "result": FineTuneResult.read({**result.to_dict(), "path": run.path, "model": model}),
    }
    if model != "t5-small":  # whose shape only the hub knows
        found["plan"] = plan(job, pods=1, memory_gib=8, techniques=["single"])
    if model == "tiny-t5":  # the model of the written run
        found["receipt"] = Run.load(run.path)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_view_of_a_chosen_model_says_that_it_is_a_toy(model: str, tmp_path: Path) -> None:
    shown = views(model, tmp_path)
    assert len(shown) >= 4
    for name, view in shown.items():
        drawn = (
            (to_text(view), to_html(view))
            if isinstance(view, Doc)
            else (as_text(view), as_html(view))
        )
        for text in drawn:
            assert (REMARK in " ".join(text.split())) == MODELS[model], name
