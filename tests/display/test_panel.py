from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.counted import calls_of
from tests.support.poll import until
from tests.support.sentences import says
from tests.support.writtenrun import T0, WrittenRun
from workbench.client.run import Run
from workbench.display.kit.doc import blocks_html, to_bundle
from workbench.display.kit.live import Picture
from workbench.display.run import panel as panels
from workbench.display.run.facts import RunFacts
from workbench.display.run.page import run_doc
from workbench.display.run.panel import RunPanel
from workbench.display.run.stacks import stacks_blocks
from workbench.rundir.view import RunView


def look(panel: RunPanel, *, at_once: bool = True) -> str:
    """The HTML of a look, without its style sheet."""
    page = str(to_bundle(panel.look(at_once=at_once))["text/html"])
    return re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def words(html: str) -> str:
    html = re.sub(r"<svg.*?</svg>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def button(panel: RunPanel, name: str) -> dict[str, object]:
    return next(dict(each) for each in panel.bar().widget.buttons if each["name"] == name)


@pytest.fixture
def panel(written: WrittenRun) -> RunPanel:
    return RunPanel(Run.load(written.paths.root))


def test_a_run_is_followed_from_the_queue_to_its_receipt(
    written: WrittenRun, panel: RunPanel
) -> None:
    assert "queued" in words(look(panel))
    written.state("running", "training")
    written.event("start", world_size=3, global_batch_size=24, parameters=1_033_984)
    for step in range(1, 26):
        written.step(step)
    page = look(panel)
    assert "25 of 100 steps, 25.0 %" in words(page) and "8 x 1 x 3 = 24" in words(page)
    assert 'aria-label="loss' in page
    assert not button(panel, "kill")["disabled"] and panel.clickable
    assert panel.still().startswith(b"\x89PNG")

    written.end()
    page = words(look(panel))
    assert (
        says(page, "Processes: all exited{}; nothing is still running on the pods")
        and "3 pods kept" in page
    )
    assert [each["name"] for each in panel.bar().widget.buttons] == ["board"]
    assert not panel.clickable and not panel.keeps_buttons
    assert not panel.over
    written.keeper("closed", alive=False)
    assert "Pods: stopped" in words(look(panel))
    assert panel.over


def test_the_start_moves_the_bar_part_by_part(written: WrittenRun, panel: RunPanel) -> None:
    seen = []
    for words_, phase in (
        ("sending inputs to the pods", {}),
        ("starting ranks", {}),
        ("", {"name": "joining the other ranks"}),
        ("", {"name": "loading data"}),
        ("", {"name": "loading model"}),
        ("", {"name": "training"}),
        ("", {"name": "evaluating"}),
        ("", {"name": "evaluating", "done": 3, "total": 25}),
    ):
        if phase:
            written.event("phase", **phase)
        written.state("starting", words_ or str(phase["name"]))
        page = look(panel)
        drawn = (re.search(r"start, \d of 7: [^<]*", page) or [""])[0]
        seen.append(re.sub(r"transformers, \d.*", "transformers, TIME", drawn))
        assert "wb-start" in page
        assert f"width: {100 * (int(seen[-1][7]) - 1) / 7:.2f}%" in page
    assert seen == [
        "start, 1 of 7: sending inputs to the pods",
        "start, 2 of 7: every rank loads torch and transformers, TIME",
        "start, 3 of 7: joining the other ranks",
        "start, 4 of 7: loading data",
        "start, 5 of 7: loading model",
        "start, 6 of 7: setting up the optimizer",
        "start, 6 of 7: evaluating",
        "start, 6 of 7: evaluating 3 of 25",
    ]
    written.event("eval", step=0, eval_loss=8.0)
    written.event("phase", name="training")
    assert says(look(panel), "the first step", "start, 7 of 7")


def test_what_was_chosen_for_the_user_is_named(written: WrittenRun, panel: RunPanel) -> None:
    written.state("running", "training")
    open_ones = ["learning_rate", "precision", "communication"]
    written.event(
        "start", precision="bf16", learning_rate=2e-5, communication="bf16", chosen=open_ones
    )
    shown = words(look(panel))
    assert (
        "technique zero1 bf16" in shown
        and "learning rate 2e-5, precision bf16, gradients sent in bf16" in shown
    )


def test_metrics_and_perplexity_of_the_last_evaluation_stand_in_the_panel(
    written: WrittenRun, panel: RunPanel
) -> None:
    written.state("running", "training")
    for step, share in ((0, 0.25), (2, 0.75)):
        written.event(
            "eval",
            step=step,
            eval_loss=2.0,
            perplexity=7.389,
            metrics={"<b>rougeL": share, "bad": "x"},
        )
    page = look(panel)
    assert "perplexity 7.389" in words(page) and "rougeL 0.75" in words(page)
    assert "<b>rougeL" not in page and "bad" not in page
    written.end(steps=2, metrics={"rougeL": 0.5}, perplexity=3.0, eval_loss=1.1)
    assert "perplexity 3 rougeL 0.5" in words(look(panel))


def test_what_a_stop_does_to_a_script_stands_on_its_button_and_in_its_receipt(
    write: Callable[..., WrittenRun],
) -> None:
    written = write({"kind": "script", "path": "train.py", "stop_grace_s": 5})
    written.state("running", "running")
    panel = RunPanel(Run.load(written.paths.root))
    stop = button(panel, "stop")
    assert stop["text"] == "Ask to stop"
    assert stop["tip"] == (
        "Asks every rank, a Trainer to end after a step and others by a signal, "
        "and kills those that have not ended 5 s later; what they wrote comes back"
    )
    assert button(panel, "kill")["sure"] == "Really kill? Only what it wrote by now comes back"
    how = "stopped when asked: the ranks ended by themselves within 4 s of SIGTERM"
    written.end("stopped", f"{how}; outputs/ has 2 files (3 bytes)")
    assert f"Stop: {how} Processes: all exited" in words(look(panel))


def test_a_trainer_is_stopped_after_a_checkpoint_and_one_that_ended_well_has_no_stop_in_its_receipt(
    written: WrittenRun, panel: RunPanel
) -> None:
    assert button(panel, "stop")["text"] == "Stop after a checkpoint"
    assert says(button(panel, "stop")["tip"], "and a later run can continue from there")
    written.end()
    assert "Stop: " not in words(look(panel))


def test_a_failed_run_keeps_its_bar_and_shows_its_card(
    written: WrittenRun, panel: RunPanel
) -> None:
    written.state("running", "training")
    for step in range(1, 41):
        written.step(step)
    fault = {
        "host": "127.0.0.3",
        "pod": "pod-1",
        "rank": 1,
        "kind": "RunError",
        "message": "loss is nan at step 41",
    }
    written.end("failed", "rank 1 on pod-1 (127.0.0.3): loss is nan", error=fault)
    page = look(panel)
    assert "width: 40.00%" in page
    assert "--wb-state: var(--jp-error-color1" in page
    assert says(words(page), "rank {} on {}{} failed first", 1, "pod-1 (127.0.0.3")
    assert says(words(page), "learning_rate={} instead of", "0.0001", "0.001")


def test_foreign_text_is_text_everywhere(written: WrittenRun, panel: RunPanel) -> None:
    evil = "<img src=x onerror=alert(1)>"
    written.state("running", evil, hint=f"no step for 31 s {evil}")
    written.log(0, f"{evil} rank 0\n")
    written.event("phase", name=evil)
    fault = {
        "pod": evil,
        "rank": 1,
        "kind": evil,
        "message": evil,
        "traceback": evil,
        "others": evil,
    }
    for _ in range(2):
        page = look(panel)
        assert "<img" not in page and "&lt;img" in page
        written.end("failed", evil, error=fault, model=evil)
    assert "<img" not in blocks_html(stacks_blocks({0: evil}))


def test_what_all_ranks_print_is_shown_once_and_each_rank_has_its_fold(
    written: WrittenRun, panel: RunPanel
) -> None:
    written.event("start", world_size=3)
    for rank in range(3):
        written.log(rank, f"[Rank {rank}] ready\n")
    written.log(1, "only me\n", "stderr")
    page = look(panel)
    assert "all [Rank 0] ready 1 only me log of rank 0 drawn when this is unfolded" in words(page)
    panel.unfold("log of rank 1", True)
    assert "log of rank 1 [Rank 1] ready only me log of rank 2 drawn when" in words(look(panel))
    panel.unfold("log of rank 1", False)
    written.end()
    page = look(panel)
    assert "log of rank 2 [Rank 2] ready" in words(page) and "drawn when" not in page


def test_the_other_curves_come_on_demand_and_at_the_end(
    written: WrittenRun, panel: RunPanel
) -> None:
    for step in range(1, 10):
        written.step(step)
    page = look(panel)
    assert 'aria-label="loss' in page and 'aria-label="learning rate' not in page
    panel.unfold("learning rate", True)
    page = look(panel)
    assert 'aria-label="learning rate' in page and "<details open><summary>learning rate" in page
    panel.unfold("learning rate", False)
    written.end()
    assert {'aria-label="learning rate', 'aria-label="gradient norm'} <= set(
        re.findall('aria-label="[a-z]+ [a-z]+', look(panel))
    )


def test_figures_have_words_that_explain_them(written: WrittenRun, panel: RunPanel) -> None:
    written.step(1)
    written.end(exact_match=0.062, time_to_first_step_s=4.2)
    page = look(panel)
    tips = dict(re.findall(r'<td title="([^"]+)"><span class="wb-name">([^<]+)<', page))
    named = {name: tip for tip, name in tips.items()}
    assert {"exact match", "time to first step", "gradient norm"} <= {*named}
    assert "first optimizer step" in named["time to first step"]


def test_stacks_are_offered_when_no_step_came(written: WrittenRun, panel: RunPanel) -> None:
    written.state("running", "training", hint="no step for 45 s")
    assert says(words(look(panel)), "no step for {} s", 45)
    assert str(button(panel, "stacks")["text"]).startswith("No step for a while")
    written.state("running", "training")
    look(panel)
    assert button(panel, "stacks")["text"] == "Stacks"


def test_stacks_of_an_ended_run_close_and_tensorboard_stays(
    written: WrittenRun, panel: RunPanel
) -> None:
    written.state("running", "training")
    look(panel)
    bar = panel.bar()
    bar._show("", lambda: "<b>positions</b>", stacks=True)
    written.end()
    look(panel)
    assert bar.widget.extra == ""
    bar._show("", lambda: "<b>board</b>")
    look(panel)
    assert "board" in bar.widget.extra


def test_a_button_that_raises_says_so(written: WrittenRun, panel: RunPanel) -> None:
    written.state("running", "training")  # its keeper is this process, which has no socket
    assert str(button(panel, "kill")["sure"]).startswith("Really kill?")
    panel.bar().hear({"click": "kill"})
    until(lambda: panel.bar().widget.note["kind"] == "wb-hint")
    written.end("failed")
    look(panel)
    assert not panel.bar().note


def test_a_script_that_printed_nothing_has_no_empty_places(
    write: Callable[..., WrittenRun],
) -> None:
    written = write({"kind": "script", "path": "train.py"})
    written.sample(rss_gib=0.5)
    panel = RunPanel(Run.load(written.paths.root))
    page = re.sub(r">\s+<", "><", look(panel))
    assert '<div class="wb-plots"><div><div class="wb-name">memory per pod' in page
    assert '<div><div class="wb-quiet">the ranks have printed nothing yet' in page
    written.end("failed")
    page = look(panel)
    assert "the ranks printed nothing" in page and "run.tensorboard()" not in page
    assert panel.still() == b""


def test_a_script_s_own_figures_are_shown_and_drawn(write: Callable[..., WrittenRun]) -> None:
    written = write({"kind": "script", "path": "train.py"})
    evil = r"<b>$\frac{</b>"
    for step in (1, 2, 3):
        written.event("step", step=step, reward=step / 4, **{evil: 1.0 * step})
        written.event("eval", step=step, metrics={"reward": step / 8, "rouge": 0.5})
    panel = RunPanel(Run.load(written.paths.root))
    page = look(panel)
    assert "reward 0.75" in words(page) and "rouge 0.5" in words(page)
    titles = re.findall(r"<summary>(.*?)</summary>", page)
    assert {"eval_rouge", "reward"} <= set(titles) and "eval_reward" not in titles
    assert 'aria-label="reward' not in page
    panel.unfold("reward", True)
    assert 'aria-label="reward' in look(panel)
    for number in range(60):
        written.event("step", step=4, **{f"figure-{number}": 1.0})
    written.end()
    page = look(panel)
    assert page.count("<svg") <= 30 and "more figures" in page and "<b>$" not in page
    undrawn = re.search(r"(\d+) more figures, drawn by run.plot\(NAME\): figure-\d+, ", words(page))
    assert undrawn is not None and int(undrawn[1]) >= 20
    assert "figures after the first 50 are in run.events() only" in page


def test_a_figure_of_steps_and_evaluations_is_told_apart(write: Callable[..., WrittenRun]) -> None:
    written = write({"kind": "script", "path": "train.py"})
    written.event("step", step=1, **{"rewards/margins": 0.5})
    written.event("eval", step=1, metrics={"rewards/margins": 0.25})
    shown = words(look(RunPanel(Run.load(written.paths.root))))
    assert "reward margin 0.5" in shown and "evaluation reward margin 0.25" in shown
    assert "rewards/margins" not in shown


def test_nobody_waits_for_what_a_trainer_prints(written: WrittenRun, panel: RunPanel) -> None:
    assert "printed" not in look(panel)
    written.end()
    assert "printed" not in look(panel)


def test_memory_is_never_more_than_at_most(written: WrittenRun, panel: RunPanel) -> None:
    written.event("memory", T0, step=0, rss_gib=0.4, peak_rss_gib=0.45)
    written.sample(T0 + 5, rss_gib=0.5)
    assert "memory per pod pod-0 now 0.50 GiB, peak 0.50 GiB" in words(look(panel))
    written.sample(T0 + 10, rss_gib=0.4)
    page = words(look(panel))
    assert "memory per pod, GiB" in page and "now 0.40 GiB, peak 0.50 GiB" in page


def test_the_receipt_says_how_to_open_tensorboard(written: WrittenRun, panel: RunPanel) -> None:
    written.step(1)
    written.paths.tensorboard.mkdir(exist_ok=True)
    (written.paths.tensorboard / "events.out.tfevents.1").touch()
    written.end()
    assert says(words(look(panel)), "TensorBoard: run.tensorboard() opens it below a cell")


def test_a_plot_is_drawn_soon_at_first_and_takes_a_hundredth_of_a_core_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(panels.time, "monotonic", lambda: now)
    ration, drawn = panels._KeptPlot(), []
    while now < 1000:
        if ration.allows():
            ration.spend(0.05)
            drawn.append(now)
        now += 0.25
    assert drawn[:6] == [0, 1, 2, 3, 4, 5]
    assert 0.05 * len(drawn) < 0.011 * 1000 + 0.3


def test_a_picture_is_drawn_four_times_a_second_however_much_is_printed(
    written: WrittenRun, panel: RunPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    monkeypatch.setattr(
        "workbench.display.kit.live.put", lambda *_, **__: drawn.append(time.monotonic())
    )
    written.state("running", "training")
    picture = Picture(panel)
    picture.start()
    until(lambda: bool(drawn))  # by then it has loaded the plotting library
    before, began = len(drawn), drawn[-1]
    step = 0
    while len(drawn) < before + 8:
        step += 1
        print_lines(written, step)
        time.sleep(0.05)
    picture.close()
    assert len(drawn) - before <= 4 * (drawn[-1] - began) + 1


def test_a_look_costs_the_same_after_many_lines(written: WrittenRun, panel: RunPanel) -> None:
    written.state("running", "training")
    costs = []
    for step in range(1, 201):
        print_lines(written, step)
        if step in (20, 200):
            look(panel)  # reads what is new
            costs.append(calls_of(lambda: look(panel)))
    assert costs[1] < 1.5 * costs[0]


def print_lines(written: WrittenRun, step: int) -> None:
    written.step(step, 1000)
    for rank in range(3):
        lines = [f"[Rank {rank}] step {step} line {n}: loss and all\n" for n in range(17)]
        written.log(rank, "".join(lines))


@pytest.mark.long
def test_the_page_of_a_hundred_thousand_events_is_short(written: WrittenRun) -> None:
    with written.paths.events.open("a") as out:
        for step in range(1, 100_001):
            out.write(
                f'{{"time_s": {T0 + step}, "rank": 0, "kind": "step", "step": '
                f'{step}, "epoch": 1.5, "loss": {8.5 / step}, "grad_norm": '
                '4.05, "learning_rate": 0.001, "samples_per_s": 19.23}\n'
            )
    written.end()
    run = Run.load(written.paths.root)
    page = str(to_bundle(run_doc(run))["text/html"])
    assert len(page) < 400_000
    assert "100,000" in page


def test_a_model_in_a_folder_is_named_by_the_folder(
    write: Callable[..., WrittenRun], tmp_path: Path
) -> None:
    view = RunView(write({"kind": "finetune", "model": str(tmp_path / "flan-mine")}).paths.root)
    named = dict(RunFacts(view).head)["model"]
    assert named.endswith("/flan-mine") and len(named) <= 40
