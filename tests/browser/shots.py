"""The pictures of README and docs: their cells, real runs in a real JupyterLab, and the shots.

`make pictures` (pictures.py) takes them for the repository. A test takes them of shorter runs and
compares what is read in them. A picture shows the output of one cell, that of the sidebar the
whole window. Folders of this machine are shown as `demo`.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser.conftest import notebook
from tests.browser.readings import LEFT_OUT, READ, Records, Texts, neutral

LIMIT_BYTES = 200_000
MOVING_BYTES = 1_500_000
MOVING_WIDTH, MOVING_HEIGHT = 838, 580  # the width that a code host gives a picture
SHOWN_MS, CLICK_MS, HELD_MS = 500, 1500, 4000
HEIGHT = 1500  # of the window: whole outputs are in sight
SIDE_WIDTH, SIDE_HEIGHT = 1110, 800
MARGIN_X, MARGIN_Y = 4, 10
WAIT_S = 300.0
STALE_S = 120.0  # for a text to become the recorded one
MOMENTARY = re.compile("evaluating|being counted")
"""Words that pass within WAIT_S; no picture has them."""
Frame = tuple[Any, int]
"""A picture of the moving picture, and how long it is shown, in milliseconds."""
PICTURED = ("card", "benchmark", "plots", "panel", "doctor", "plan", "compose")
"""Cells whose output is a picture."""
LAST_BEFORE = {"benchmark.png": "Published, not measured here"}
"""Words that begin the part of an output below its picture."""
WITHOUT_TECHNIQUES = ("benchmark.png", "plots.png", "sidebar.png")
"""Pictures that show fewer techniques in the test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Length of the runs: long for handsome curves, short for the test."""

    cluster: str
    """Code of a cluster of two pods in the folder demo."""
    end: str
    """Code after the last picture."""
    steps: int
    """Steps of a row of the benchmark."""
    eval_rows: int
    techniques: tuple[str, ...]
    """Techniques of the benchmark; the panel shows the last, on two pods."""
    live_pods: int
    """Pods of the moving picture's run."""
    stop_at: int
    """Step at which the moving picture's run is stopped."""
    frame_every_ms: int


LONG = Scale(
    cluster='Cluster(LocalPods(), PodSpec(cpus=1, memory_gib=2), count=2, path="demo").start()',
    end="cluster.close()",
    steps=80,
    eval_rows=24,
    techniques=("zero3", "fsdp", "zero1"),
    live_pods=2,
    stop_at=60,
    frame_every_ms=700,
)
SHORT = Scale(
    cluster='Cluster.attach("demo")',
    end="",
    steps=12,
    eval_rows=4,
    techniques=("zero1",),
    live_pods=1,
    stop_at=2,
    frame_every_ms=4000,
)

FAILING = """
import os
import time
from pathlib import Path

# The card has the memory of each pod once there are two samples.
run = Path(os.environ["WORKBENCH_RUN_DIR"]).name
samples = Path(os.environ["WORKBENCH_POD"]).parents[1] / "runs" / run / "samples.jsonl"
pods = ('"pod-0"', '"pod-1"')
while not samples.exists() or any(samples.read_text().count(pod) < 2 for pod in pods):
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    import torch

    rows, weights = torch.ones(8, 64), torch.ones(32, 64)
    print("loss", (rows @ weights).mean())
"""


def cells(scale: Scale) -> dict[str, str]:
    """The notebook's cells by their names; a name of a picture is the name of its cell.

    The form's job and those of the runs have the same trace, so that only one is made.
    """
    return {
        "start": f"""
from workbench import Benchmark, Cluster, FineTune, LocalPods, PodSpec, Run, Script, plan
from workbench.forms import compose
cluster = {scale.cluster}
""",
        "compose": """
compose(technique="zero2", count=2, cpus=1, max_steps=200, learning_rate=2e-3, eval_steps=50)
""",
        "plan": """
plan(FineTune(model="t5-large", per_device_train_batch_size=32, max_source_length=96,
              max_target_length=96),
     pods=3, gpus=1, gpu_memory_gib=24)
""",
        "card": """
failed = cluster.submit(Script("train.py"))
failed.wait(progress=False)
failed
""",
        "benchmark": f"""
rows = {{"kind": "wikisql-mini", "eval_rows": {scale.eval_rows}}}
job = FineTune(dataset=rows, max_steps={scale.steps}, eval_steps={scale.steps // 4},
               learning_rate=2e-3, predict_rows=0, profile_step=0)
grid = Benchmark([job], {scale.techniques}, pods=[1, 2], vary={{"global_batch_size": [12]}})
table = grid.run(cluster)
table
""",
        "plots": "table.plots()",
        "panel": """
run = Run.load(table.rows[-1].path)
run
""",
        "doctor": "cluster.doctor(job)",
        "names": """
failed.name, failed.tags = "first try", ["shapes"]
run.name, run.tags = "baseline", ["paper", "2e-3"]
""",
        "moving": f"""
live = cluster.submit(job.replace(technique="zero1", max_steps=2000, eval_steps=40),
                      pods={scale.live_pods})
live
""",
        "end": scale.end,
    }


# Width of the window by cell: outputs end at the right edge of their picture.
WIDTH = 1130
WIDTHS = {"benchmark": 1400, "doctor": 1180}

# Whether any text had to be changed is returned.
_NEUTRAL_FOLDERS = """folder => {
    let changed = false;
    const frames = [...document.querySelectorAll("iframe")].map(frame => frame.contentDocument);
    for (const page of [document, ...frames]) {
        const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
            const node = walk.currentNode;
            if (!node.data.includes(folder)) continue;
            node.data = node.data.replaceAll(folder + "/", "").replaceAll(folder, "demo");
            changed = true;
        }
    }
    return changed;
}"""
TO_TOP = "e => e.closest('.jp-Cell-outputWrapper')?.scrollIntoView({block: 'start'})"
# An arrow on a button, as a browser's own pointer is in no picture.
_POINT = """button => {
    const {x, y, width, height} = button.getBoundingClientRect();
    const arrow = document.createElement("div");
    arrow.id = "pointer";
    arrow.style.cssText = `position: fixed; z-index: 9999; pointer-events: none;
        left: ${x + width / 2}px; top: ${y + height / 2}px`;
    arrow.innerHTML = `<svg width="22" height="32" viewBox="-1 -1 12 18">
        <path d="M0 0v13l3-3 2 5 2-1-2-5h4z" fill="black" stroke="white"/></svg>`;
    document.body.append(arrow);
}"""
# Only outputs are in sight, with room around them.
_BARE = """
.jp-Notebook .jp-Cell-inputWrapper, .jp-OutputPrompt, .jp-Collapser { opacity: 0; }
.jp-Notebook .jp-Cell-outputWrapper { padding: 16px 0; }
"""


@dataclass(kw_only=True)
class Shots:
    """The pictures of one notebook, and the texts that are read in them."""

    book: Any
    folder: Path
    """Folder of the pictures."""
    scale: Scale
    recorded: Records | None = None
    """Records to compare with; None: take the pictures as they are."""
    texts: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Neutral texts by picture and part of it."""

    def take_all(self) -> None:
        """Run the cells and take every picture."""
        self.book.page.add_style_tag(content=_BARE)
        for number, name in enumerate(cells(self.scale)):
            self._resize(WIDTHS.get(name, WIDTH), HEIGHT)
            area = self.book.run(number)
            if name == "moving":
                self._take_moving(area)
            self.book.wait_idle(600)
            if name in PICTURED:
                self._read(f"{name}.png", "whole", area)
                self._keep(self._shoot(area, LAST_BEFORE.get(f"{name}.png", "")), name)

    def _resize(self, width: int, height: int) -> None:
        self.book.page.set_viewport_size({"width": width, "height": height})

    def _read(self, picture: str, part: str, *areas: Any) -> None:
        """Read a part of a picture; wait for the recorded text, if any."""
        wanted = self.recorded[picture]["texts"][part] if self.recorded else None
        began = time.monotonic()
        while True:
            self.book.page.wait_for_timeout(800 if wanted else 1500)
            lines = self._lines(picture, areas)
            waited_s = time.monotonic() - began
            is_stale = wanted is not None and lines != wanted
            is_momentary = MOMENTARY.search("\n".join(lines)) is not None
            if not (is_stale and waited_s < STALE_S) and not (is_momentary and waited_s < WAIT_S):
                break
        self.texts.setdefault(picture, {})[part] = lines

    def _lines(self, picture: str, areas: Sequence[Any]) -> list[str]:
        self.book.page.evaluate(_NEUTRAL_FOLDERS, str(self.book.lab.folder))
        lines: list[str] = []
        for area in areas:
            area.evaluate(TO_TOP)
            lines += area.evaluate(READ, [", ".join(LEFT_OUT), LAST_BEFORE.get(picture)])
        return neutral(lines, techniques=picture not in WITHOUT_TECHNIQUES)

    def _shoot(self, area: Any, last_before: str = "") -> Any:
        """Take the picture of an output, from edge to edge of its content."""
        area.evaluate(TO_TOP)
        parts = area.locator(".jp-OutputArea-output").all()
        boxes = [box for part in parts if (box := part.bounding_box()) and box["height"] > 4]
        left = min(box["x"] for box in boxes) - MARGIN_X
        top = min(box["y"] for box in boxes) - MARGIN_Y
        right = max(box["x"] + box["width"] for box in boxes) + MARGIN_X
        bottom = max(box["y"] + box["height"] for box in boxes) + MARGIN_Y
        if last_before:
            bottom = area.get_by_text(last_before).first.bounding_box()["y"]
        clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        return self._screenshot(clip)

    def _screenshot(self, clip: Any = None) -> Any:
        """Take a picture of the page without names of this machine's folders."""
        folder = str(self.book.lab.folder)
        while True:
            self.book.page.evaluate(_NEUTRAL_FOLDERS, folder)
            shot = self.book.page.screenshot(clip=clip)
            # An output that was drawn anew in between is taken again.
            if not self.book.page.evaluate(_NEUTRAL_FOLDERS, folder):
                return Image.open(io.BytesIO(shot)).convert("RGB")

    def _keep(self, picture: Any, name: str) -> None:
        path = self.folder / f"{name}.png"
        picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < LIMIT_BYTES, f"{name}: {path.stat().st_size} bytes"

    def _take_sidebar(self) -> None:
        """Take the sidebar with the run in progress in a tab, before a tab with a comparison."""
        page = self.book.page
        self._resize(SIDE_WIDTH, SIDE_HEIGHT)
        page.evaluate("() => window.jupyterapp.shell.activateById('deepspeed-workbench-runs')")
        side = page.locator(".dw-side")
        live = side.locator(".dw-run[data-state='running']")
        baseline = side.locator(".dw-run").filter(has_text="baseline")
        for row in (live, baseline):
            row.get_by_label("Compare run").check(timeout=1000 * WAIT_S)
        side.get_by_role("button", name="Compare the ticked runs").click()
        tab = page.locator(".dw-tab:visible")
        frame = tab.frame_locator("iframe")
        frame.get_by_text("baseline").locator("visible=true").first.wait_for(timeout=1000 * WAIT_S)
        live.locator(".dw-open").click()
        frame.get_by_text(re.compile(r"of 2,000 steps.*left")).wait_for(timeout=1000 * WAIT_S)
        frame.locator("summary", has_text="gradient norm").click()
        page.mouse.move(SIDE_WIDTH - 60, SIDE_HEIGHT - 60)  # no button is under the pointer
        # Many runs and few runs are read alike: all are in sight.
        self._resize(SIDE_WIDTH, 2 * SIDE_HEIGHT)
        self._read("sidebar.png", "whole", side, tab)
        self._resize(SIDE_WIDTH, SIDE_HEIGHT)
        self._keep(self._screenshot(), "sidebar")
        page.evaluate(
            """() => {
                const {shell} = window.jupyterapp;
                shell.collapseLeft();
                for (const tab of [...shell.widgets("main")]) if (!tab.context) tab.close();
            }"""
        )
        page.wait_for_function("() => window.jupyterapp.shell.currentWidget?.context?.path")

    def _take_moving(self, area: Any) -> None:
        """Take the moving picture: a run, from its start to a stop by the button, and a card."""
        area.locator(".wb").first.wait_for()
        frames = self._film(area, lambda: _step(area) >= self.scale.stop_at)
        self._read("panel.gif", "live", area)

        # The run goes on while the sidebar's picture is taken.
        self._take_sidebar()
        self._resize(WIDTH, HEIGHT)

        # The click, and what follows until the end.
        stop = area.get_by_role("button", name="Stop after a checkpoint")
        self._shoot(area)
        stop.evaluate(_POINT)
        frames.append((_on_paper(self._shoot(area)), CLICK_MS))
        stop.click()
        self.book.page.wait_for_timeout(300)  # the answer is in sight for a second
        frames.append((_on_paper(self._shoot(area)), CLICK_MS))
        self.book.page.evaluate("() => document.getElementById('pointer').remove()")
        frames += self._film(area, lambda: "Download:" in area.inner_text())
        self._read("panel.gif", "receipt", area)
        frames.append((_on_paper(self._shoot(area)), HELD_MS))

        # The card of another run that failed.
        with Image.open(self.folder / "card.png") as card:
            frames.append((_on_paper(card.convert("RGB")), HELD_MS))
        self.texts["panel.gif"]["card"] = self.texts["card.png"]["whole"]
        self._keep_moving(frames)

    def _film(self, area: Any, is_over: Callable[[], bool]) -> list[Frame]:
        frames = []
        deadline = time.monotonic() + 600
        while not is_over():
            assert time.monotonic() < deadline, f"not over in 600 s: {area.inner_text()}"
            frames.append((_on_paper(self._shoot(area)), SHOWN_MS))
            self.book.page.wait_for_timeout(self.scale.frame_every_ms)
        return frames

    def _keep_moving(self, frames: list[Frame]) -> None:
        # The start is the same for seconds: equal neighbours are one frame.
        moving = frames[:1]
        for frame, shown_ms in frames[1:]:
            if frame.tobytes() != moving[-1][0].tobytes():
                moving.append((frame, shown_ms))
        first, *others = [frame.quantize(128) for frame, _ in moving]
        durations = [shown_ms for _, shown_ms in moving]
        path = self.folder / "panel.gif"
        first.save(
            path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True
        )
        assert path.stat().st_size < MOVING_BYTES, path.stat().st_size


def _step(area: Any) -> int:
    step = re.search(r"([\d,]+) of 2,000 steps", area.inner_text())
    return int(step[1].replace(",", "")) if step else 0


def _on_paper(shot: Any) -> Any:
    """A picture as large as fits, on white paper of the frames' size."""
    scale = min(MOVING_WIDTH / shot.width, MOVING_HEIGHT / shot.height)
    size = (round(scale * shot.width), round(scale * shot.height))
    paper = Image.new("RGB", (MOVING_WIDTH, MOVING_HEIGHT), "white")
    paper.paste(shot.resize(size, Image.Resampling.LANCZOS), (0, 0))
    return paper


def take_pictures(
    lab: Any, open_book: Callable[..., Any], folder: Path, scale: Scale, recorded: Records | None
) -> Texts:
    """Take all pictures into a folder and return the texts that were read in them."""
    folder.mkdir(parents=True, exist_ok=True)
    (lab.folder / "train.py").write_text(FAILING)
    book = open_book(lab.add(notebook(*cells(scale).values()), "demo.ipynb"), own_page=True)
    shots = Shots(book=book, folder=folder, scale=scale, recorded=recorded)
    shots.take_all()
    return shots.texts
