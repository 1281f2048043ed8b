"""An example of every record that has a view, by its class, for tests of all views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.client.test_history import make_run
from tests.display.test_plan import LARGE, table
from tests.display.test_scores import made as scores
from tests.support.benchrows import SAMPLE, make_row, mixed_rows, write_row
from tests.support.writtenrun import T0, WrittenRun, write_run
from workbench import Run, compare, history
from workbench.base.table import Grid
from workbench.benchmark.benchmark import Benchmark
from workbench.benchmark.forecast import (
    BenchmarkForecast,
    ForecastRow,
    MemoryForecast,
)
from workbench.benchmark.result import BenchmarkPlots, BenchmarkResult
from workbench.client.cluster import Cluster
from workbench.client.plot import RunPlot
from workbench.client.result import RunResult
from workbench.client.stacks import Stacks
from workbench.client.tables.comparison import ComparisonPlot, RunComparison
from workbench.client.tables.history import History
from workbench.client.tensorboard.board import Board, BoardServer, Route, Way
from workbench.display.failure import FaultCard, fault_card
from workbench.finetune.answers.conversation import Conversation
from workbench.finetune.answers.predictions import Answers, Predictions
from workbench.finetune.data.scoring import judge
from workbench.finetune.export.folder import Export
from workbench.finetune.export.push import ModelCard, Pushed
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.lm_eval.scores import Scores
from workbench.finetune.plan.gpus import GpuRow, GpuTable
from workbench.finetune.plan.reading import Length, RowPreview
from workbench.finetune.plan.table import PlanTable
from workbench.finetune.profile.compare import ProfileComparison
from workbench.finetune.profile.parse import Profile, read_profile
from workbench.handover.kubeflow.manifest import Manifest
from workbench.keeper.launch import LaunchCommand
from workbench.pods.doctor.examination import Diagnosis, Finding, HostReport, Verdict
from workbench.pods.doctor.exchange import Exchange
from workbench.pods.local.pods import LocalPods
from workbench.pods.node_table import Node, NodeTable
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.result import RunFault

STACK = """Current thread 0x00007f32 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 1 in forward
  File "/pods/pod-0/runs/r1/script/own/train.py", line 40 in train
"""
FAULT = {
    "host": "127.0.0.3",
    "pod": "pod-1",
    "rank": 1,
    "kind": "OutOfMemoryError",
    "traceback": "Traceback\n  x\n",
    "message": "CUDA out of memory. Tried to allocate 2.50 GiB. 1.23 GiB free",
    "others": "2 ranks lost their peer",
}


def trained(folder: Path) -> WrittenRun:
    """Write a run as it stands after 120 steps on three pods."""
    written = write_run(folder)
    written.state("running", "training")
    written.event(
        "start", model="tiny-t5", world_size=3, global_batch_size=24, parameters=1_033_984
    )
    written.event("eval", step=0, eval_loss=9.5)
    for step in range(1, 121):
        written.step(step, max_steps=120)
        written.sample(T0 + step, rss_gib=0.5 + step / 1000)
    written.event("eval", T0 + 120, step=120, eval_loss=0.25)
    for rank in range(3):
        written.log(rank, f"[Rank {rank}] ready\n")
    return written


def ended(folder: Path, state: str = "succeeded") -> Run:
    written = trained(folder)
    if state == "failed":
        written.end("failed", "out of memory", error=FAULT)
    else:
        written.end(state, steps=120, exact_match=0.4, eval_loss=0.25, train_samples_per_s=131.2)
    written.keeper("closed", alive=False)
    return Run.load(written.paths.root)


def _benchmark(folder: Path) -> BenchmarkResult:
    paths = {n: str(write_row(folder / name)) for n, name in enumerate(("one", "three"))}
    rows = [*mixed_rows(), make_row("zero2", 3, 95.0, exact_match=0.5)]
    rows += [make_row("fsdp", n, 80.0 * n, path=path) for n, path in enumerate(paths.values(), 1)]
    return BenchmarkResult(name="sweep", folder=folder, rows=tuple(rows))


def _forecast(folder: Path) -> BenchmarkForecast:
    rows = (
        ForecastRow(name="zero1, 3 pods", runs=2, memory=MemoryForecast(gib=1.5)),
        ForecastRow(
            name="single",
            runs=1,
            memory=MemoryForecast(gib=9.5, refusal="needs 9.5 GiB"),
        ),
    )
    return BenchmarkForecast(name="sweep", rows=rows)


def _comparison(folder: Path) -> RunComparison:
    runs = [write_row(folder / name, technique=name) for name in ("ddp", "zero1")]
    return compare([Run.load(path) for path in runs])


def _history(folder: Path) -> History:
    for n in range(3):
        make_run(folder / f"2026112{n}-zero1", float(n), {"learning_rate": 0.001 * (n + 1)})
    return history(folder)


def _plot(folder: Path) -> RunPlot:
    return ended(folder).plot()


def _cluster(folder: Path) -> Cluster:
    written = write_run(folder)
    written.keeper("closed", alive=False)
    return Cluster(LocalPods(), count=3, path=written.cluster.root)


def _diagnosis(_: Path) -> Diagnosis:
    def host(number: int, torch: Verdict) -> HostReport:
        fix = "" if torch is Verdict.GOOD else "install torch 2.13.0 there"
        findings = (
            Finding(check="ssh", verdict=Verdict.GOOD, detail="0.5 s"),
            Finding(check="torch", verdict=torch, detail=f"2.1{number}.0", fix=fix),
        )
        return HostReport(pod=f"pod-{number}", address=f"10.0.0.{number}", findings=findings)

    sizes = tuple((1 << n, 0.0008 * 2 ** (n - 20)) for n in (20, 22, 24))
    exchange = Exchange(
        pods=2,
        ranks=4,
        backend="gloo",
        transports=("gloo over eth0",),
        latency_s=2e-4,
        sizes=sizes,
    )
    hosts = (host(3, Verdict.GOOD), host(2, Verdict.BAD))
    return Diagnosis(hosts=hosts, exchange=exchange, hosts_s=0.9)


def _gpus(_: Path) -> GpuTable:
    rows = (
        GpuRow(kind="L4", memory_gib=22.0, precision="bf16", why="too small"),
        GpuRow(kind="H100", memory_gib=79.0, precision="bf16", gpus=2, pods=1, plan=LARGE[0]),
    )
    return GpuTable(
        job=FineTune(),
        parameters=4_673_000,
        memory_gib=64.0,
        gpus_on_pod=8,
        most_pods=16,
        rows=rows,
    )


def _nodes(_: Path) -> NodeTable:
    node: dict[str, Any] = {"product": "L40S", "gpus": 4, "gpu_memory_gib": 44.4}
    nodes = (
        Node(name="a", taken=1, free_cpus=14.5, free_memory_gib=60.0, fits=3, why="", **node),
        Node(
            name="b", taken=4, free_cpus=2.0, free_memory_gib=8.0, fits=0, why="no GPU free", **node
        ),
    )
    return NodeTable(nodes=nodes, pod=PodSpec(gpus=1), count=4)


def _export(_: Path) -> Export:
    files = {"config.json": 1_234, "model.safetensors": 242_000_000}
    return Export(folder=Path("/models/mine"), files=files, dtype="bf16", family="causal")


def _pushed(folder: Path) -> Pushed:
    export = _export(folder)
    return Pushed(
        url="https://huggingface.co/me/model",
        repo_id="me/model",
        commit="0a1b2c3d",
        files=export.files,
        dtype="bf16",
        start_lines=export.start_lines,
    )


def _model_card(folder: Path) -> ModelCard:
    return ModelCard(
        repo_id="me/model",
        result=ended(folder).result,
        job=FineTune(),
        dtype="bf16",
        base="google-t5/t5-small",
        dataset="Salesforce/wikisql",
        start_lines=_export(folder).start_lines,
    )


def _preview(_: Path) -> RowPreview:
    return RowPreview(
        job=FineTune(max_source_length=10),
        rows=[[("ask", False), ("answer", True)]],
        lengths=[Length(4, 2, False, False), Length(23, 8, True, False)],
        train_rows=1234,
        eval_rows=5,
        duplicates=7,
        overlap=3,
    )


def _board(_: Path) -> Board:
    server = BoardServer(
        folder="/runs", port=6006, pid=1, start_time=1, owner=1, token="T0k", nonce="n"
    )
    route = Route(way=Way.DIRECT, template="http://127.0.0.1:{port}/{key}/")
    return Board(server=server, route=route, runs=("tiny",))


def _manifest(folder: Path) -> Manifest:
    return ended(folder).manifest("pytorchjob", image="registry/worker:1")


def _profiles(_: Path) -> ProfileComparison:
    one = read_profile(SAMPLE)
    return compare(one, read_profile(SAMPLE, 6.0), names=("zero1", "zero3"))


def _predictions(_: Path) -> Predictions:
    said = ("SELECT COUNT people WHERE town = b", "SELECT COUNT people", "")
    rows = [judge(f"How many live in town {n}?", said[1], words) for n, words in enumerate(said)]
    return Predictions(tuple(rows))


def _answers(folder: Path) -> Answers:
    models = (_predictions(folder), _predictions(folder))
    return Answers(names=("before training", "zero1 on 3 pods"), models=models)


def _chat(_: Path) -> Conversation:
    chat = Conversation(["before", "after"], lambda name, _turns, _on_text: f"words of {name}")
    chat.send("How many?")
    return chat


EXAMPLES: Mapping[type, Callable[[Path], object]] = {
    Answers: _answers,
    Benchmark: lambda _: Benchmark([FineTune()], ["single"], pods=[1]),
    BenchmarkForecast: _forecast,
    BenchmarkPlots: lambda folder: _benchmark(folder).plots(),
    BenchmarkResult: _benchmark,
    Board: _board,
    Cluster: _cluster,
    ComparisonPlot: lambda folder: _comparison(folder).plot(),
    Conversation: _chat,
    Diagnosis: _diagnosis,
    Export: _export,
    FaultCard: lambda _: fault_card(RunFault(**FAULT), FineTune()),
    GpuTable: _gpus,
    Grid: lambda _: Grid(columns=("pod", "GiB"), rows=[("a", "1.5"), ("b", "2.5")], right={"GiB"}),
    History: _history,
    LaunchCommand: lambda _: LaunchCommand(argv=["deepspeed", "train.py"], env={"A": "1"}),
    Manifest: _manifest,
    ModelCard: _model_card,
    NodeTable: _nodes,
    PlanTable: lambda _: table(*LARGE),
    Predictions: _predictions,
    Profile: lambda _: read_profile(SAMPLE),
    ProfileComparison: _profiles,
    Pushed: _pushed,
    RowPreview: _preview,
    Run: ended,
    RunComparison: _comparison,
    RunPlot: _plot,
    RunResult: lambda folder: RunResult.load(ended(folder).path),
    Scores: lambda _: scores(),
    Stacks: lambda _: Stacks({0: STACK, 1: ""}),
}
"""A function that makes a record below a folder, by the record's class."""
