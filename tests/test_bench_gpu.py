"""The measurement of a GPU: its formulas, its time limit, and its form for CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.gpu.__main__ import Bench, job_of, main, never_tried
from tools.bench.gpu.cases import ON_CPU, ON_GPU, SHAPES, Case, flops_of_token, mfu, shape_of
from tools.bench.gpu.page import page
from workbench.verify.claims.registry import ROWS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "verify.md"
LLAMA_8B = 8_030_261_248


def test_the_rows_that_the_page_calls_untried_exist() -> None:
    names = never_tried(PAGE.read_text(encoding="utf-8"))
    assert len(names) > 10
    assert set(names) <= {row.name for row in ROWS}
    assert never_tried("## Untried on a GPU\n\n| row |\n|---|\n| `a` | x |\n\n## B\n| `b` |") == [
        "a"
    ]


@pytest.mark.parametrize(("size", "parameters"), [("1B", 1_235_814_400), ("8B", LLAMA_8B)])
def test_shapes_have_the_parameters_of_their_namesakes(size: str, parameters: int) -> None:
    from transformers import LlamaConfig

    from workbench.finetune.model.load import parameter_count, without_weights

    assert parameter_count(without_weights(LlamaConfig(**shape_of(size)))) == parameters
    assert {case.size for case in ON_GPU} | {"tiny"} == set(SHAPES)


def test_a_published_rate_has_its_published_share_of_the_peak() -> None:
    """torchtitan: 5,762 tokens/s at 8,192 tokens are 33 % with attention counted whole."""
    case = Case(size="8B", peft="none", tokens=8192, rows=1)
    share = mfu(5762, case, LLAMA_8B, "NVIDIA H100 80GB HBM3")
    whole = 5762 * (flops_of_token(case, LLAMA_8B) + 6 * 32 * 4096 * 8192) / 989e12
    assert (share, whole) == (pytest.approx(0.30, abs=0.01), pytest.approx(0.34, abs=0.015))
    lora = Case(size="8B", peft="lora", tokens=8192, rows=1)
    assert flops_of_token(lora, LLAMA_8B) < flops_of_token(case, LLAMA_8B)
    assert mfu(5762, case, LLAMA_8B, "another GPU") is None


def test_a_case_trains_rows_of_one_length_without_padding(tmp_path: Path) -> None:
    for case in (*ON_GPU, *ON_CPU):
        job = job_of(case, tmp_path, tmp_path / "rows.jsonl")
        assert (job.max_source_length or 0) + (job.max_target_length or 0) == case.tokens
        assert case.steps > 3


def test_cases_without_time_are_named_and_the_record_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, minutes=0.01, gpus=0)
    bench.rates(None, ON_GPU, until_s=1.0)  # type: ignore[arg-type]  # no case runs
    assert bench.record["cases"] == []
    assert len(bench.record["skipped"]) == len(ON_GPU)
    bench.write()
    assert "Not measured: 1B full, 2048 tokens x 8: no time" in page(
        json.loads((tmp_path / "gpu.json").read_text())
    )


def test_the_page_shows_errors_and_figures() -> None:
    row = {
        "name": "a",
        "ours": {"tokens_per_s": 1234.5, "mfu": 0.451, "planned_gib": 10.0, "waits": {"w": 2}},
        "plain": {"error": "out of memory\nmore"},
        "ratio": None,
    }
    text = page({"cases": [row], "skipped": []})
    assert "| a | 1,234 | 45% | out of memory | – | – |" in text
    assert "| a | 10.00 | – | – | – |" in text
    assert "| a | w 2 |" in text


@pytest.mark.slow
@pytest.mark.long
def test_without_a_gpu_a_tiny_model_is_measured_and_a_row_is_tried(tmp_path: Path) -> None:
    main([str(tmp_path), "--minutes", "60"])
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["name"] for row in record["cases"]] == [case.name for case in ON_CPU]
    for row in record["cases"]:
        assert row["ours"]["tokens_per_s"] > 0, row
        assert row["plain"]["tokens_per_s"] > 0, row
        assert row["ratio"] > 0
        assert row["ours"]["waits"]["cudaStreamSynchronize"] == 0
    (tried,) = record["verify"]["rows"]
    assert (tried["name"], tried["verdict"]) == ("step-without-waits", "cannot be tried here")
