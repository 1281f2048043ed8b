"""The one table of which drawing belongs to which record; importing this fills the views of `base/shown`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from workbench.base import shown
from workbench.base.errors import WorkbenchError
from workbench.base.table import Grid, text_table
from workbench.benchmark.benchmark import Benchmark
from workbench.benchmark.forecast import BenchmarkForecast
from workbench.benchmark.report import Report, gather
from workbench.benchmark.result import BenchmarkPlots, BenchmarkResult
from workbench.client.card import Card
from workbench.client.cluster import Cluster
from workbench.client.comparison import RunComparison
from workbench.client.history import History
from workbench.client.result import RunResult
from workbench.client.run import Run
from workbench.client.trained import RunPlot
from workbench.display.benchmark.forecast import forecast_doc
from workbench.display.benchmark.live import BenchmarkLive
from workbench.display.benchmark.report import plots_doc, report_html, report_markdown
from workbench.display.benchmark.table import benchmark_html, benchmark_text
from workbench.display.cluster.panel import follow_start, show_cluster
from workbench.display.cluster.view import cluster_doc, look_at
from workbench.display.failure.error import error_lines
from workbench.display.failure.fault import FaultCard, fault_doc
from workbench.display.kit.doc import Code, Doc, Fold, to_bundle, to_html, to_markdown, to_text
from workbench.display.kit.downloads import report_links
from workbench.display.kit.line import follow_run
from workbench.display.kit.plots.live import show_doc
from workbench.display.kit.table import html_table
from workbench.display.records.answers import answers_doc, predictions_doc, predictions_grid
from workbench.display.records.board import board_bundle, board_html, show_board
from workbench.display.records.conversation import conversation_doc, show_conversation
from workbench.display.records.doctor import diagnosis_doc
from workbench.display.records.export import export_doc, manifest_doc, model_card_doc, pushed_doc
from workbench.display.records.history import history_doc, history_grid, runs_doc, show_history
from workbench.display.records.nodes import nodes_doc
from workbench.display.records.plan import gpus_doc, plan_doc
from workbench.display.records.profile import comparison_doc, profile_doc
from workbench.display.records.result import result_doc
from workbench.display.records.rows import rows_doc
from workbench.display.run.card import card_html
from workbench.display.run.page import run_doc
from workbench.display.run.panel import run_plot_doc, show_run, show_run_plot
from workbench.keeper.launch import LaunchCommand
from workbench.planner.gpus import GpuTable
from workbench.planner.reading import RowPreview
from workbench.planner.table import PlanTable
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.kubernetes.nodes import NodeTable
from workbench.results.answers.conversation import Conversation
from workbench.results.answers.predictions import Answers, Predictions
from workbench.results.export.folder import Export
from workbench.results.export.model_card import ModelCard
from workbench.results.export.push import Pushed
from workbench.results.kubeflow.manifest import Manifest
from workbench.results.profile.compare import ProfileComparison
from workbench.results.profile.parse import Profile
from workbench.results.tensorboard.board import Board


@contextmanager
def _follow_benchmark(_: Benchmark) -> Iterator[Callable[..., None]]:
    with closing(BenchmarkLive()) as live:
        yield live.update


def _plots_doc(plots: BenchmarkPlots) -> Doc:
    return plots_doc(gather(plots.result.rows, title=plots.result.name, with_cards=False))


_DOCS: Mapping[type, Callable[..., Doc]] = {
    Answers: answers_doc,
    Benchmark: lambda it: forecast_doc(it.forecast()),
    BenchmarkForecast: forecast_doc,
    BenchmarkPlots: _plots_doc,
    Cluster: lambda it: cluster_doc(look_at(it)),
    Conversation: conversation_doc,
    Diagnosis: diagnosis_doc,
    Export: export_doc,
    FaultCard: fault_doc,
    History: history_doc,
    LaunchCommand: lambda it: Doc(blocks=[Fold("launch command", [Code(str(it))])]),
    Manifest: manifest_doc,
    ModelCard: model_card_doc,
    GpuTable: gpus_doc,
    NodeTable: nodes_doc,
    PlanTable: plan_doc,
    Predictions: predictions_doc,
    Profile: profile_doc,
    ProfileComparison: comparison_doc,
    Pushed: pushed_doc,
    Run: run_doc,
    RowPreview: rows_doc,
    RunComparison: runs_doc,
    RunPlot: run_plot_doc,
    RunResult: result_doc,
}
"""What is drawn from one `Doc`, as whatever is asked for."""

_VIEWS: Mapping[Any, Mapping[type, Callable[..., Any]]] = {
    shown.as_text: {
        BenchmarkResult: lambda it: benchmark_text(it.groups),
        Board: repr,
        Grid: text_table,
        LaunchCommand: str,
        Manifest: Manifest.to_text,
    },
    shown.as_html: {
        BenchmarkResult: lambda it: benchmark_html(it.groups, links=report_links(it.folder)),
        Board: board_html,
        Grid: html_table,
    },
    shown.as_error: {WorkbenchError: error_lines},
    shown.as_grid: {History: history_grid, Predictions: predictions_grid},
    shown.as_page: {Card: card_html, Report: report_html},
    shown.as_markdown: {Report: report_markdown},
    shown.as_bundle: {Board: board_bundle},
    shown.as_live: {
        BenchmarkPlots: lambda it: show_doc(_plots_doc(it)),
        Board: show_board,
        Cluster: show_cluster,
        Conversation: show_conversation,
        History: show_history,
        Run: show_run,
        RunComparison: lambda it: show_doc(runs_doc(it)),
        RunPlot: show_run_plot,
    },
    shown.follow: {Benchmark: _follow_benchmark, Cluster: follow_start, Run: follow_run},
}


_DRAWINGS: Mapping[Any, Callable[[Doc], Any]] = {
    shown.as_text: to_text,
    shown.as_html: to_html,
    shown.as_markdown: to_markdown,
    shown.as_bundle: to_bundle,
}


def _drawn(draw: Callable[[Doc], Any], doc: Callable[..., Doc]) -> Callable[..., Any]:
    return lambda record: draw(doc(record))


for _record, _doc in _DOCS.items():
    for _view, _to in _DRAWINGS.items():
        _view.register(_record, _drawn(_to, _doc))
for _view, _drawings in _VIEWS.items():
    for _record, _draw in _drawings.items():
        _view.register(_record, _draw)
