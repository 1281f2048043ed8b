"""The table from records to drawings; the import fills the views of `base/shown`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from workbench.base import display_protocol
from workbench.base.errors import WorkbenchError
from workbench.base.table import Grid, as_grid, text_table
from workbench.benchmark.benchmark import Benchmark
from workbench.benchmark.forecast import BenchmarkForecast
from workbench.benchmark.result import BenchmarkPlots, BenchmarkResult, Report
from workbench.client.cluster import Cluster
from workbench.client.plot import RunPlot
from workbench.client.result import Card, RunResult
from workbench.client.run import Run
from workbench.client.stacks import Stacks
from workbench.client.tables.comparison import ComparisonPlot, RunComparison
from workbench.client.tables.history import History
from workbench.client.tensorboard.board import Board
from workbench.display.benchmark import live, report, table
from workbench.display.cluster import cluster_doc, follow_start, look_at, show_cluster
from workbench.display.failure import FaultCard, error_lines, fault_doc
from workbench.display.kit.doc import Code, Doc, Fold, to_bundle, to_html, to_markdown, to_text
from workbench.display.kit.live import show_doc
from workbench.display.kit.templates import html_table
from workbench.display.records import (
    answers,
    board,
    export,
    history,
    plan,
    pods,
    result,
    rows,
    scores,
)
from workbench.display.run import page, panel
from workbench.display.run.stacks import stacks_blocks
from workbench.finetune.answers.conversation import Conversation
from workbench.finetune.answers.predictions import Answers, Predictions
from workbench.finetune.export.folder import Export
from workbench.finetune.export.push import ModelCard, Pushed
from workbench.finetune.lm_eval.scores import Scores
from workbench.finetune.plan.gpus import GpuTable
from workbench.finetune.plan.reading import RowPreview
from workbench.finetune.plan.table import PlanTable
from workbench.finetune.profile.compare import ProfileComparison
from workbench.finetune.profile.parse import Profile
from workbench.handover.kubeflow.manifest import Manifest
from workbench.keeper.launch import LaunchCommand
from workbench.pods.doctor.examination import Diagnosis
from workbench.pods.node_table import NodeTable


@contextmanager
def _follow_benchmark(_: Benchmark) -> Iterator[display_protocol.Draw]:
    with closing(live.BenchmarkLive()) as lines:
        yield lines.update


def _plots_doc(plots: BenchmarkPlots) -> Doc:
    benchmark = plots.result
    without_cards = Report(benchmark.rows, title=benchmark.name, with_cards=False)
    return report.plots_doc(without_cards)


_DOCS: Mapping[type, Callable[..., Doc]] = {
    Answers: answers.answers_doc,
    Benchmark: lambda it: live.forecast_doc(it.forecast()),
    BenchmarkForecast: live.forecast_doc,
    BenchmarkPlots: _plots_doc,
    BenchmarkResult: table.benchmark_doc,
    Cluster: lambda it: cluster_doc(look_at(it)),
    ComparisonPlot: history.comparison_plot_doc,
    Conversation: answers.conversation_doc,
    Diagnosis: pods.diagnosis_doc,
    Export: export.export_doc,
    FaultCard: fault_doc,
    History: history.history_doc,
    LaunchCommand: lambda it: Doc(blocks=[Fold("launch command", [Code(str(it))])]),
    Manifest: export.manifest_doc,
    ModelCard: export.model_card_doc,
    GpuTable: plan.gpus_doc,
    NodeTable: pods.nodes_doc,
    PlanTable: plan.plan_doc,
    Predictions: answers.predictions_doc,
    Profile: result.profile_doc,
    ProfileComparison: result.comparison_doc,
    Pushed: export.pushed_doc,
    Run: page.run_doc,
    RowPreview: rows.rows_doc,
    RunComparison: history.comparison_doc,
    RunPlot: panel.run_plot_doc,
    RunResult: result.result_doc,
    Scores: scores.scores_doc,
    Stacks: lambda it: Doc(blocks=stacks_blocks(it)),
}
"""Records drawn from a `Doc`, in any format."""

_VIEWS: Mapping[Any, Mapping[type, Callable[..., Any]]] = {
    display_protocol.as_text: {
        Board: repr,
        Grid: text_table,
        LaunchCommand: str,
        Manifest: Manifest.to_text,
    },
    display_protocol.as_html: {
        Board: board.board_html,
        Grid: html_table,
    },
    display_protocol.as_error: {WorkbenchError: error_lines},
    display_protocol.as_markdown: {ModelCard: lambda it: to_markdown(export.model_card_doc(it))},
    display_protocol.as_bundle: {
        RunResult: lambda it: to_bundle(result.shown_result_doc(it)),
    },
    as_grid: {
        History: history.history_grid,
        Predictions: answers.predictions_grid,
        Scores: scores.scores_grid,
    },
    display_protocol.as_page: {
        Card: page.card_html,
        Report: report.report_html,
    },
    display_protocol.as_live: {
        BenchmarkPlots: lambda it: show_doc(_plots_doc(it)),
        Board: board.show_board,
        Cluster: show_cluster,
        ComparisonPlot: lambda it: show_doc(history.comparison_plot_doc(it)),
        Conversation: answers.show_conversation,
        History: history.show_history,
        Run: panel.show_run,
        RunComparison: lambda it: show_doc(history.comparison_doc(it)),
        RunPlot: panel.show_run_plot,
    },
    display_protocol.follow: {
        Benchmark: _follow_benchmark,
        Cluster: follow_start,
        Run: panel.wait_for_run,
    },
}


for _record, _doc in _DOCS.items():
    display_protocol.as_text.register(_record, lambda it, doc=_doc: to_text(doc(it)))
    display_protocol.as_html.register(_record, lambda it, doc=_doc: to_html(doc(it)))
    display_protocol.as_bundle.register(_record, lambda it, doc=_doc: to_bundle(doc(it)))
for _view, _drawings in _VIEWS.items():
    for _record, _draw in _drawings.items():
        _view.register(_record, _draw)
