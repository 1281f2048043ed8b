"""Measure one GPU, and write one JSON, from which docs/verify.md is made.

`python -m tools.bench.gpu FOLDER [--minutes 9.5]` measures: rates and memory of fine-tuning beside
plain transformers, the waits of a traced step, and the rows of `workbench verify` that were never
tried on a GPU. FOLDER takes models, runs and `gpu.json`. Every part has its share of the minutes,
and the JSON is written after each case: a limit leaves what was measured. A machine without a GPU
takes a tiny model. `python -m tools.bench.gpu --page gpu.json` prints the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tools.bench.gpu.cases import ON_CPU, ON_GPU, Case, mfu
from tools.bench.gpu.page import page
from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.base.files import write_json
from workbench.base.json_values import as_float
from workbench.base.machine.seats import gpus_here
from workbench.finetune.plan.plan import predict
from workbench.finetune.techniques.sizes import CONTEXT_BYTES
from workbench.rundir.paths import TRACE
from workbench.verify.claims.processes import waits_in

ROOT = Path(__file__).resolve().parents[3]
NEVER_TRIED = "## Untried on a GPU"
"""Heading of the rows of docs/verify.md that part three tries."""
_RATES = 0.65
"""Share of the minutes for rates; the rest is for the rows of `verify`."""
_GIB = 2**30


class Bench:
    """The measurements of a folder, and the time that is left."""

    def __init__(self, folder: Path, minutes: float, gpus: int) -> None:
        self.folder = folder
        self.gpus = gpus
        self.began_s = time.monotonic()
        self.limit_s = 60 * minutes
        self.record: dict[str, Any] = {"minutes": minutes, "cases": [], "skipped": []}

    @property
    def left_s(self) -> float:
        return self.began_s + self.limit_s - time.monotonic()

    def write(self) -> None:
        write_json(self.folder / "gpu.json", self.record)

    def child(self, *words: str, timeout_s: float) -> dict[str, Any]:
        """Return what a process of the plain way prints, or why it prints nothing."""
        command = [sys.executable, "-m", "tools.bench.gpu.plain", *words]
        try:
            ran = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, timeout_s)
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {timeout_s:.0f} s"}
        if ran.returncode:
            return {"error": ran.stderr.strip().splitlines()[-1:]}
        figures: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
        return figures

    def rates(self, cluster: Cluster, cases: Sequence[Case], *, until_s: float) -> None:
        """Measure cases while more than `until_s` seconds are left."""
        models: dict[str, dict[str, Any]] = {}
        for case in cases:
            if self.left_s - case.expected_s < until_s:
                self.record["skipped"].append(f"{case.name}: no time")
                continue
            folder = self.folder / f"model-{case.size}"
            if case.size not in models:
                models[case.size] = self.child(
                    "make", str(folder), case.size, timeout_s=self.left_s - until_s
                )
            made = models[case.size]
            row: dict[str, Any] = {"name": case.name, "case": asdict(case), **made}
            self.record["cases"].append(row)
            if "error" not in made:
                row["ours"] = self.ours(cluster, folder, case, until_s=until_s)
                what = json.dumps(asdict(case))
                limit_s = self.left_s - until_s
                row["plain"] = self.child("train", str(folder), what, timeout_s=limit_s)
                self._judge(row, case)
            self.write()

    def _judge(self, row: dict[str, Any], case: Case) -> None:
        """Add the MFU of both ways, and their ratio."""
        rates = []
        for way in ("ours", "plain"):
            rate = row[way].get("tokens_per_s")
            if rate:
                rates.append(rate)
                row[way]["mfu"] = mfu(rate, case, row["parameters"], self.record["device"])
        row["ratio"] = rates[0] / rates[1] if len(rates) == 2 else None

    def ours(self, cluster: Cluster, model: Path, case: Case, *, until_s: float) -> dict[str, Any]:
        """Train with the workbench, and return its figures or its error."""
        job = job_of(case, model, _texts(self.folder, case))
        run = cluster.submit(job)
        try:
            result = run.wait(max(1.0, self.left_s - until_s), progress=False)
        except TimeoutError:
            run.cancel()
            return {"error": "not done in time"}
        if result.error is not None:
            return {"error": str(result.error).splitlines()[:1]}
        figures: dict[str, Any] = {"tokens_per_s": result.padded_tokens_per_s}
        if self.gpus:
            need = predict(job, pods=1, gpus=1)
            planned = need.pod_gpu_gib if need else None
            figures["planned_gib"] = None if planned is None else planned - CONTEXT_BYTES / _GIB
            for kind in ("allocated", "reserved"):
                name = f"cuda_{kind}_gib"
                values = [as_float(e.data.get(name)) for e in run.events() if e.kind == "memory"]
                figures[f"{kind}_gib"] = max((each for each in values if each), default=None)
        traces = list(run.path.rglob(TRACE))
        if traces:
            figures["waits"] = waits_in(traces[0])
        return figures

    def verify(self) -> None:
        """Try the rows that the page lists as untried, in the rest of the time."""
        names = never_tried((ROOT / "docs" / "verify.md").read_text(encoding="utf-8"))
        if not self.gpus:
            names = names[:1]
        file = self.folder / "verify.json"
        command = [sys.executable, "-m", "workbench", "verify", "--json", str(file)]
        command += ["--out", str(self.folder / "verify")]
        command += ["--minutes", f"{max(0.1, self.left_s / 60 - 0.25):.3g}"]
        for name in names:
            command += ["--only", name]
        # The exit code is 1 where a row failed.
        subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL)
        if file.exists():
            self.record["verify"] = json.loads(file.read_text(encoding="utf-8"))


def never_tried(text: str) -> list[str]:
    """Return the rows that a page lists under `NEVER_TRIED`, in the order of the page."""
    _, _, rest = text.partition(f"{NEVER_TRIED}\n")
    lines = rest.partition("\n## ")[0].splitlines()
    return [line.split("`")[1] for line in lines if line.startswith("| `")]


def job_of(case: Case, model: Path, rows: Path) -> FineTune:
    """Return the job of a case: no padding, no recording, the defaults of the package."""
    answer = case.tokens // 4
    return FineTune(
        model=str(model),
        dataset={"kind": "files", "train": str(rows), "eval": str(rows), "ignore": ()},
        technique="single",
        peft=case.peft,
        lora={"r": 16, "alpha": 32} if case.peft != "none" else {},
        precision="bf16",
        gradient_checkpointing=case.recomputes,
        max_steps=case.steps,
        logging_steps=10 * case.steps,
        learning_rate=1e-5,
        per_device_train_batch_size=case.rows,
        per_device_eval_batch_size=1,
        max_source_length=case.tokens - answer,
        max_target_length=answer,
        loss_on="all",
        eval_strategy="no",
        trace_steps=1,
        profile_step=0,
        predict_rows=0,
    )


def _texts(folder: Path, case: Case) -> Path:
    """Write rows that are longer than allowed, so that each is cut to the same length."""
    file = folder / f"rows-{case.tokens}.jsonl"
    words = ("count", "the", "rows", "of", "table", "where", "name", "is")
    lines = []
    for number in range(2 * case.rows):
        text = " ".join(f"{words[(at + number) % 8]} {at % 97}" for at in range(case.tokens))
        lines.append(json.dumps({"source": text, "target": text}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--page", action="store_true", help="print the tables of a JSON")
    asked = parser.parse_args(arguments)
    if asked.page:
        print(page(json.loads(asked.folder.read_text(encoding="utf-8"))))
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    gpus = min(1, len(gpus_here(None)))
    bench = Bench(asked.folder.absolute(), asked.minutes, gpus)
    spec = PodSpec(cpus=8, gpus=1) if gpus else PodSpec(cpus=1)
    with Cluster(LocalPods(), spec, path=bench.folder / "cluster") as cluster:
        facts = cluster.run(_facts, progress=False)[0]
        bench.record.update(json.loads(str(facts)))
        cases = ON_GPU if gpus else [replace(each) for each in ON_CPU]
        bench.rates(cluster, cases, until_s=(1 - _RATES) * bench.limit_s)
    bench.verify()
    bench.record["took_s"] = bench.limit_s - bench.left_s
    bench.write()
    print(page(bench.record))


def _facts() -> str:
    import json

    import torch

    from workbench.base.versions import installed_versions

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return json.dumps({"device": device, "versions": installed_versions()})


if __name__ == "__main__":
    main()
