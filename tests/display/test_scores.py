"""Figures of lm-eval: read from its file, kept in a run directory, and shown."""

from __future__ import annotations

from pathlib import Path

from tests.support.writtenrun import write_run
from workbench import Run, history
from workbench.finetune.lm_eval.scores import Scores, as_evaluation, read_scores, scores_from
from workbench.rundir.catalog.benchmarks import add_evaluation, benchmark_figures

EVIL = "<img src=x>\x1b[31m"
TRAINED = {
    "results": {
        "arc": {
            "alias": "arc",
            "sample_len": 40,
            "acc,none": 0.625,
            "acc_stderr,none": 0.05,
            "exact_match,strict": 0.5,
            "exact_match_stderr,strict": "N/A",
        },
        "wiki": {"word_perplexity,none": 20.5, "word_perplexity_stderr,none": "N/A"},
    },
    "higher_is_better": {
        "arc": {"acc": True, "exact_match": True},
        "wiki": {"word_perplexity": False},
    },
    "n-samples": {"arc": {"original": 99, "effective": 40}, "wiki": {"effective": 7}},
}
BASE = {"results": {"arc": {"acc,none": 0.75, "acc_stderr,none": 0.0625}}}


def made(**options: object) -> Scores:
    raw = {"trained": TRAINED, "base": BASE}
    return Scores(scores=tuple(scores_from(raw, options)), run_id=f"e1 {EVIL}", lm_eval="0.4.13")


def test_every_figure_is_read_with_its_base_error_and_direction() -> None:
    accuracy, match, perplexity = made(limit=40, num_fewshot=2)
    assert (accuracy.base, accuracy.trained, accuracy.difference) == (0.75, 0.625, -0.125)
    assert (accuracy.base_stderr, accuracy.stderr, accuracy.rows) == (0.0625, 0.05, 40)
    assert accuracy.name == "arc acc, num_fewshot=2, limit=40"
    assert (match.metric, match.base, match.difference, match.stderr) == (
        "exact_match,strict",
        None,
        None,
        None,
    )
    assert [each.better for each in (accuracy, match, perplexity)] == ["greater", "greater", "less"]
    assert made(apply_chat_template=True).scores[0].name == "arc acc, apply_chat_template"


def test_text_and_page_state_the_same() -> None:
    scores = made()
    text, page = str(scores), scores._repr_html_()
    for fact in ("0.75 ± 0.0625", "0.625 ± 0.05", "-0.125", "↓ lower is better", "arc", "20.5"):
        assert fact in text
        assert fact in page
    assert "<img" not in page
    assert "\x1b" not in text + page
    assert scores.to_dataframe().iloc[0]["difference"] == -0.125


def test_figures_stand_in_the_run_its_card_and_history(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    written.end(metrics={"rougeL": 0.5})
    add_evaluation(written.paths, as_evaluation(made(limit=1)))
    add_evaluation(written.paths, as_evaluation(made()))
    run = Run.load(written.paths.root)
    assert run.result.benchmarks == (made(limit=1), made())  # type: ignore[attr-defined]
    card = run.result.to_html(tmp_path / "card.html").read_text()
    assert "Benchmarks before and after training" in card
    row = history(tmp_path).to_dataframe().iloc[0]
    assert row["metric.rougeL"] == 0.5
    assert row["metric.arc acc"] == 0.625
    assert row["metric.arc acc before"] == 0.75
    assert row["metric.arc acc, limit=1"] == 0.625


def test_a_damaged_file_hides_nothing_of_the_run(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    written.end()
    assert read_scores(written.paths) == ()
    for content in (
        "{",
        "[]",
        '{"evaluations": 3}',
        '{"evaluations": [{"scores": [{"name": 3}]}]}',
    ):
        written.paths.benchmarks.write_text(content)
        assert benchmark_figures(written.paths) == {}
        assert history(tmp_path)[0].id
        read_scores(written.paths)
