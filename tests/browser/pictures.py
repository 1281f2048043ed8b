"""`make pictures`: the pictures of README and docs, taken anew of real runs in a real JupyterLab.

No test: its name keeps it out of the tests. Each picture is the output of
one cell, in the light theme, as wide as the cell at 1,400 px; that of the
sidebar is the whole window. Folders of this machine are shown as `demo`.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from tests.browser.conftest import REPOSITORY, notebook

PICTURES = REPOSITORY / "docs" / "pictures"
LIMIT_BYTES = 200_000
WIDTH, HEIGHT = 1400, 1500
pytestmark = pytest.mark.timeout(900)

START = """
from workbench import Benchmark, Cluster, FineTune, LocalPods, PodSpec, Script, compose, plan
cluster = Cluster(LocalPods(), PodSpec(cpus=1, memory_gib=2), count=2, path="demo").start()
"""
PANEL = """
job = FineTune(technique="zero1", max_steps=240, eval_steps=60, per_device_train_batch_size=6,
               learning_rate=2e-3, dataset={"kind": "wikisql-mini", "eval_rows": 100},
               predict_rows=16)
run = cluster.submit(job)
run
"""
FAILING = """
import os
import torch

rows, weights = torch.ones(8, 64), torch.ones(32, 64)
if os.environ["RANK"] == "1":
    print("loss", (rows @ weights).mean())
"""
CARD = """
failed = cluster.submit(Script("train.py"))
failed.wait(progress=False)
failed
"""
PLAN = """
plan(FineTune(model="t5-large", per_device_train_batch_size=32, max_source_length=96,
              max_target_length=96),
     pods=3, gpus=1, gpu_memory_gib=24)
"""
DOCTOR = "cluster.doctor(job)"
BENCHMARK = """
small = FineTune(dataset={"kind": "wikisql-mini", "train_rows": 400, "eval_rows": 24}, max_steps=12,
                 max_source_length=64, max_target_length=64, predict_rows=0, profile_step=0)
grid = Benchmark([small], ["ddp", "zero1", "zero3", "fsdp"], pods=[1, 2],
                 vary={"global_batch_size": [24]})
table = grid.run(cluster)
table
"""
PLOTS = "table.plots()"
SIDE_WIDTH, SIDE_HEIGHT = 1205, 800
COMPOSE = (
    'compose(model="tiny-llama", technique="zero2", '
    'peft="lora", count=2, max_steps=200, prompt="alpaca")'
)

LIVE = """
live = cluster.submit(FineTune(technique="zero3", max_steps=2000, eval_steps=40, learning_rate=2e-3,
                               dataset={"kind": "wikisql-mini", "eval_rows": 40}, predict_rows=0))
live
"""
MOVING_BYTES = 1_500_000
MOVING_WIDTH, MOVING_HEIGHT = 838, 560  # the width that a code host gives a picture
SHOWN_MS, HELD_MS = 500, 3000

_NEUTRAL = """([folder]) => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode;
        if (node.data.includes(folder))
            node.data = node.data.replaceAll(folder + "/", "").replaceAll(folder, "demo");
    }
}"""


def take(book: Any, index: int, name: str, *, most: int) -> None:
    """Take the picture of a cell's output, cut where it ends."""
    area = book.output(index)
    area.evaluate("e => e.scrollIntoView({block: 'start'})")
    book.page.wait_for_timeout(1500)
    book.page.evaluate(_NEUTRAL, [str(book.lab.folder)])
    parts = area.locator(".jp-OutputArea-output").all()
    boxes = [box for part in parts if (box := part.bounding_box()) and box["height"] > 4]
    left, top = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
    right = max(box["x"] + box["width"] for box in boxes)
    bottom = max(box["y"] + box["height"] for box in boxes)
    clip = {
        "x": left - 4,
        "y": top + 1,
        "width": right - left + 5,
        "height": min(most, bottom - top) - 1,
    }
    keep(book.page.screenshot(clip=clip), name)


def take_sidebar(book: Any) -> None:
    """Take the picture of the sidebar and of the tab of the run in progress."""
    page = book.page
    page.set_viewport_size({"width": SIDE_WIDTH, "height": SIDE_HEIGHT})
    page.evaluate("() => window.jupyterapp.shell.activateById('deepspeed-workbench-runs')")
    page.locator(".dw-run .dw-open").click(timeout=120_000)
    frame = page.locator(".dw-tab:visible").frame_locator("iframe")
    frame.get_by_text(re.compile(r"^1\d\d of 240 steps")).wait_for(timeout=120_000)
    keep(page.screenshot(), "sidebar")
    page.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.close(); "
        "window.jupyterapp.shell.collapseLeft(); }"
    )
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.context?.path")
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


def take_moving(book: Any, index: int) -> None:
    """Take the moving picture: a run, from its start to a stop by the button, and the card."""
    area = book.run(index)
    area.locator(".wb").first.wait_for()
    area.evaluate("e => e.scrollIntoView({block: 'start'})")
    frames = []
    stop = area.get_by_role("button", name="Stop after a checkpoint")
    asked = False
    deadline = time.monotonic() + 300
    while "Download:" not in area.inner_text():
        assert time.monotonic() < deadline, "the run did not end in 300 s"
        frames.append(frame_of(book, area))
        step = re.search(r"([\d,]+) of 2,000 steps", area.inner_text())
        if step and int(step[1].replace(",", "")) >= 160 and not asked:
            stop.click()
            asked = True
        book.page.wait_for_timeout(700)
    # The start is the same for seconds: equal neighbours are one frame.
    moving = [frame for at, frame in enumerate(frames) if at == 0 or frame != frames[at - 1]]
    card = on_paper(Image.open(PICTURES / "card.png").convert("RGB"))
    moving += [frame_of(book, area), card]
    shown = [SHOWN_MS] * (len(moving) - 2) + [HELD_MS, 2 * HELD_MS]
    path = PICTURES / "panel.gif"
    images = [Image.open(io.BytesIO(frame)).convert("RGB").quantize(64) for frame in moving]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=shown, loop=0, optimize=True
    )
    assert path.stat().st_size < MOVING_BYTES, path.stat().st_size


def frame_of(book: Any, area: Any) -> bytes:
    """One frame: the top of a cell's output."""
    area.evaluate("e => e.scrollIntoView({block: 'start'})")
    book.page.evaluate(_NEUTRAL, [str(book.lab.folder)])
    box = area.bounding_box()
    clip = {
        "x": box["x"],
        "y": max(box["y"], 0),
        "width": box["width"],
        "height": min(box["height"], box["width"] * MOVING_HEIGHT / MOVING_WIDTH),
    }
    return on_paper(Image.open(io.BytesIO(book.page.screenshot(clip=clip))).convert("RGB"))


def on_paper(shot: Any) -> bytes:
    """A picture at the width of the frames, on white paper of their size."""
    shot = shot.resize((MOVING_WIDTH, round(shot.height * MOVING_WIDTH / shot.width)))
    paper = Image.new("RGB", (MOVING_WIDTH, MOVING_HEIGHT), "white")
    paper.paste(shot, (0, 0))
    data = io.BytesIO()
    paper.save(data, "PNG")
    return data.getvalue()


def keep(shot: bytes, name: str) -> None:
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    path = PICTURES / f"{name}.png"
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < LIMIT_BYTES, f"{name}: {path.stat().st_size} bytes"


def test_take_the_pictures(lab: Any, open_book: Callable[[str], Any]) -> None:
    PICTURES.mkdir(exist_ok=True)
    (lab.folder / "train.py").write_text(FAILING)
    cells = (
        START,
        PANEL,
        "result = run.wait(progress=False)",
        CARD,
        PLAN,
        DOCTOR,
        BENCHMARK,
        PLOTS,
        COMPOSE,
    )
    book = open_book(lab.add(notebook(*cells, LIVE, "cluster.close()"), "demo.ipynb"))
    book.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    names = {
        2: "panel",
        3: "card",
        4: "plan",
        5: "doctor",
        6: "benchmark",
        7: "plots",
        8: "compose",
    }
    for index in range(len(cells)):
        book.run(index)
        if index == 1:
            take_sidebar(book)
        book.wait_idle(600)
        if index in names:
            most = (
                520 if names[index] == "benchmark" else HEIGHT
            )  # what others published is no picture
            take(book, 1 if names[index] == "panel" else index, names[index], most=most)
    book.page.set_viewport_size({"width": 1100, "height": 900})
    take_moving(book, len(cells))
    book.wait_idle(120)
    book.run(len(cells) + 1)
    book.wait_idle(120)
