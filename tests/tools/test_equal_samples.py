"""The table of options beside plain runs at equal samples; its recorded runs are in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import equal_samples
from tools.bench.equal_samples import SEEDS, WAYS, Ran, Way, cells, read, seen, table

RECORDED = Path(equal_samples.__file__).parent / "recorded" / "equal_samples.jsonl"
DOCS = Path(__file__).parents[2] / "docs" / "measurements.md"
BY_NAME = {way.name: way for way in WAYS}


@pytest.mark.parametrize("way", [way for way in WAYS if way.plain], ids=lambda way: way.name)
def test_a_way_differs_from_its_plain_way_in_nothing_else(way: Way, tmp_path: Path) -> None:
    other = BY_NAME[way.plain]
    assert not other.plain and other.pods == way.pods
    jobs = [each.job(tmp_path, 3).to_dict() for each in (way, other)]
    changed = {name for name in jobs[0] if jobs[0][name] != jobs[1][name]}
    allowed = {
        # A packed row holds several rows, so fewer make a step of as many rows.
        "packing": {"packing", "per_device_train_batch_size", "gradient_accumulation_steps"},
        "learning_rate": {"learning_rate"},
        "bf16": {"communication"},
        # The ranks of `local-sgd` send weights.
        "local-sgd": {"technique", "communication"},
    }
    (expected,) = (names for word, names in allowed.items() if word in way.name)
    assert changed == expected
    assert [job["max_steps"] for job in jobs] == [None, None]


def made(way: Way, losses: list[float], cpu_s: float = 8.0, sent: float = 100.0) -> dict[int, Ran]:
    return {
        seed: Ran(
            way=way.name,
            seed=seed,
            steps=200,
            before=9.0,
            eval_loss=loss,
            cpu_s=cpu_s + seed,
            s_per_row=0.5 * cpu_s,
            sent=sent,
            on="here",
            load=1.0,
        )
        for seed, loss in enumerate(losses)
    }


def test_a_row_pairs_the_runs_of_a_seed() -> None:
    way, other = BY_NAME["local-sgd, 2 pods"], BY_NAME["ddp, 2 pods"]
    # The seeds differ by more than the ways.
    ours = made(way, [4.3, 5.1, 6.4, 7.2, 8.5], cpu_s=4.0, sent=25.0)
    # Seeds are paired by their number, not by their place in the record.
    plain = dict(reversed(made(other, [4.0, 5.0, 6.0, 7.0, 8.0]).items()))
    assert list(cells(way, ours, plain)) == [
        *(way.name, other.name),
        *("6.3000 ± 1.6658", "6.0000 ± 1.5811", "+0.3 ± 0.16", "higher"),
        *("6.0", "0.60 × (0.50 to 0.67)", "0.25 × (0.25 to 0.25)"),
    ]


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        # A mean of 0.1 is 3.2 standard errors: the deviation is 0.071.
        ([0.0, 0.1, 0.1, 0.1, 0.2], "higher"),
        ([-0.0, -0.1, -0.1, -0.1, -0.2], "lower"),
        # The deviation is 0.11, and a mean of 0.08 is 1.6 standard errors.
        ([-0.1, 0.1, 0.1, 0.1, 0.2], "within the spread"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], "within the spread"),
    ],
)
def test_a_difference_counts_where_the_seeds_do_not_explain_it(
    differences: list[float], word: str
) -> None:
    assert seen(differences) == word


def test_the_docs_have_the_table_of_the_recorded_runs() -> None:
    runs = read(RECORDED)
    assert sorted((run.way, run.seed) for run in runs) == sorted(
        (way.name, seed) for way in WAYS for seed in range(SEEDS)
    )
    grid = table(runs)
    lines = [f"| {' | '.join(map(str, row))} |" for row in (grid.columns, *grid.rows)]
    page = DOCS.read_text(encoding="utf-8")
    assert [line for line in lines if line not in page] == []
    assert len(lines) == 5
