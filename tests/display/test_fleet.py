"""A run of many ranks: every view has the odd ones first, and counts the others."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.support.writtenrun import T0, WrittenRun, write_run
from workbench import Run
from workbench.base.display_protocol import as_html, as_text
from workbench.display.kit.outliers import MOST, split
from workbench.rundir.totals import RunTotals

PODS, SLOTS = 32, 8
RANKS = PODS * SLOTS


def written(folder: Path, *, slow: int, idle: int, factor: float = 1.25) -> WrittenRun:
    """A run with a slow rank, and with a pod whose first GPU is idle."""
    run = write_run(folder, pods=PODS, slots=SLOTS)
    run.state("running", "training")
    run.event("start", world_size=RANKS, max_steps=100)
    run.log(0, "hello\n")
    for rank in range(RANKS):
        device = {"name": "H100", "pod": f"pod-{rank // SLOTS}", "threads": 8, "backend": "nccl"}
        run.event("device", rank=rank, **device)
        run.event("memory", rank=rank, step=1, rss_gib=4.0, peak_rss_gib=4 + rank % 7 / 100)
    for pod in range(PODS):
        gpus = []
        for index in range(SLOTS):
            is_idle = pod == idle and index == 0
            percent = 0.0 if is_idle else 90.0 + index
            gpus.append({"index": index, "percent": percent, "used_gib": 60.0, "total_gib": 80.0})
        run.sample(
            T0 + 1, rss_gib=30 + pod / 100, pod=f"pod-{pod}", host=f"127.0.0.{pod + 2}", gpus=gpus
        )
    run.step(50)
    own_s = [0.2 + rank % 5 / 1000 for rank in range(RANKS)]
    own_s[slow] = 0.202 * factor
    run.event("pace", steps=60, step_s=0.8, own_s=own_s)
    return run


def views(run: WrittenRun) -> dict[str, str]:
    shown = Run.load(run.paths.root)
    return {"text": as_text(shown), "HTML": re.sub("<[^>]*>", " ", as_html(shown))}


@pytest.mark.parametrize("seed", range(3))
def test_the_slow_rank_and_the_idle_gpu_are_first_and_the_others_are_counted(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    slow, idle = chance.randrange(RANKS), chance.randrange(PODS)
    run = written(tmp_path, slow=slow, idle=idle)
    sentence = f"rank {slow} on pod-{slow // SLOTS} takes 1.25 times the median of the ranks"
    for ended in (False, True):
        if ended:
            totals = RunTotals.of(Run.load(run.paths.root).events())
            run.end(**totals.facts(None))
        for name, text in views(run).items():
            flat = " ".join(text.split())
            assert sentence in flat, name
            workers = flat.partition("Workers; ")[2]
            rows = re.findall(r" (\d+) (pod-\d+) \d+ ms", workers)
            assert rows[0] == (str(slow), f"pod-{slow // SLOTS}"), name
            assert f"and {RANKS - MOST} more 2" in workers, name
            gpus = flat.partition("GPUs, by their driver")[2]
            assert re.search(r"(pod-\d+) (\d)", gpus).groups() == (f"pod-{idle}", "0"), name
            assert f"and {RANKS - MOST} more 60.00 GiB" in gpus, name
            assert f"{PODS - MOST} more pods" in flat, name
            assert f"logs of {RANKS - 8} more ranks" in flat or name == "text"
    result = Run.load(run.paths.root).result
    assert result is not None
    assert sentence in result.slow_rank and len(result.workers) == RANKS
    assert sentence in as_text(result) and f"and {PODS - MOST} more" in as_text(result)


def test_a_rank_is_named_only_if_the_others_wait_for_it(tmp_path: Path) -> None:
    for number, (factor, words) in enumerate({1.2: "", 1.3: "rank 9 on pod-1 takes 1.3"}.items()):
        run = written(tmp_path / str(number), slow=9, idle=0, factor=factor)
        assert Run.load(run.paths.root).progress.slow_rank.startswith(words)
        assert bool(words) == bool(Run.load(run.paths.root).progress.slow_rank)
    # A difference of less than a twentieth of the step makes nobody wait.
    run.event("pace", steps=60, step_s=9.0, own_s=[0.2] * 9 + [0.5] + [0.2] * (RANKS - 10))
    assert not Run.load(run.paths.root).progress.slow_rank


@pytest.mark.parametrize("own_s", [[], [0.0] * RANKS, ["a", None], {}, [1e308] * 999, "x"])
def test_a_strange_comparison_names_no_rank_and_hides_nothing(
    tmp_path: Path, own_s: object
) -> None:
    run = written(tmp_path, slow=9, idle=0)
    run.event("pace", steps=60, step_s=9.0, own_s=own_s)
    run.event("pace", rank=3, steps=60, step_s=0.1, own_s=[0.1] * 9 + [9.0])
    shown = Run.load(run.paths.root)
    assert "Workers" in as_text(shown) and not shown.progress.slow_rank


def test_no_row_is_lost_or_doubled() -> None:
    chance = random.Random(7)
    for count in (0, 1, MOST, MOST + 1, 300):
        columns = [[chance.choice([None, chance.random()]) for _ in range(count)] for _ in range(3)]
        order, left_out = split(columns)
        assert sorted(order) == list(range(count))
        assert len(left_out) == (0 if count <= MOST else count - MOST)


def test_a_sick_gpu_is_first_and_only_its_trouble_is_shown(tmp_path: Path) -> None:
    run = written(tmp_path, slow=9, idle=0)
    text = as_text(Run.load(run.paths.root))
    assert "trouble" not in text
    usual = {"percent": 90.0, "used_gib": 60.0, "total_gib": 80.0}
    hot = {**usual, "index": 5, "throttle": 0x40, "sm_mhz": 1200.0, "most_mhz": 1980.0}
    sick = {**usual, "index": 6, "ecc_errors": 3}
    run.sample(T0 + 2, rss_gib=30, pod="pod-7", host="127.0.0.9", gpus=[hot, sick])
    for text in views(run).values():
        gpus = " ".join(text.split()).partition("GPUs, by their driver")[2]
        rows = re.findall(r"(pod-\d+) (\d) 60", gpus)
        assert {*rows[:3]} == {("pod-0", "0"), ("pod-7", "5"), ("pod-7", "6")}
        assert "throttled by heat in 50.0 % of the samples, at 1,200 of 1,980 MHz" in gpus
        assert "3 uncorrected ECC errors" in gpus
