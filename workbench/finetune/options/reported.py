"""Figures and facts that a fine-tuning job reports, and their places in plots and tables.

The module is light: keeper, panel and `workbench ls` read it for runs of any kind.
"""

from __future__ import annotations

import math

from workbench.base.words import number, percent
from workbench.rundir.events import EventKind
from workbench.rundir.figures.metric import Better, Fact, Metric, Reported

_MOST_NATS = 700  # e to the 700 is near the largest float
_METRICS = (
    Metric(
        name="aux_loss",
        title="load-balancing loss",
        better=Better.LESS,
        in_panel=False,
    ),
    Metric(
        name="perplexity",
        event=EventKind.EVAL,
        title="perplexity",
        better=Better.LESS,
        plot="perplexity of the evaluation rows",
        in_tables=False,
    ),
    Metric(
        name="rewards/margins",
        title="reward margin",
        unit="chosen minus rejected reward",
        better=Better.GREATER,
        in_panel=False,
    ),
    Metric(
        name="rewards/accuracies",
        title="pairs with the chosen answer ahead",
        unit="share of pairs",
        better=Better.GREATER,
        in_panel=False,
    ),
    Metric(
        name="rewards/chosen",
        title="reward of chosen answers",
        unit="reward",
        better=Better.GREATER,
        in_panel=False,
    ),
    Metric(
        name="rewards/rejected",
        title="reward of rejected answers",
        unit="reward",
        better=Better.LESS,
        in_panel=False,
    ),
    Metric(
        name="kl",
        title="divergence from the reference",
        unit="nats",
        in_panel=False,
    ),
    Metric(
        name="reward",
        title="reward",
        better=Better.GREATER,
        in_panel=False,
    ),
    Metric(
        name="reward_std",
        title="standard deviation of rewards",
        unit="reward",
        in_panel=False,
    ),
    Metric(
        name="mean_reward",
        title="mean score",
        unit="score",
        in_panel=False,
    ),
    Metric(
        name="margin",
        title="margin",
        better=Better.GREATER,
        in_panel=False,
    ),
    Metric(
        name="accuracy",
        title="accuracy",
        better=Better.GREATER,
        in_panel=False,
    ),
    Metric(
        name="completions/mean_length",
        title="mean length of answers",
        unit="tokens",
        in_panel=False,
    ),
    Metric(
        name="completions/clipped_ratio",
        title="answers cut at the limit",
        unit="share of answers",
        better=Better.LESS,
        in_panel=False,
    ),
    Metric(
        name="entropy",
        title="entropy",
        unit="nats",
        in_panel=False,
    ),
    Metric(
        name="nll_loss",
        title="loss of chosen answers",
        unit="nats per token",
        better=Better.LESS,
        in_panel=False,
    ),
    Metric(
        name="log_odds_ratio",
        title="log odds ratio",
        better=Better.GREATER,
        in_panel=False,
    ),
)
_FACTS = (
    Fact(name="peft", in_history=True, is_word=True),
    Fact(name="perplexity", title="perplexity", write=number, in_history=True),
    Fact(name="exact_match", title="exact match", write=percent, in_history=True),
    Fact(name="useful_tokens_per_s", in_history=True),
    Fact(name="padded_tokens_per_s"),
    Fact(name="profiled_tokens"),
    Fact(name="not_read"),
    Fact(name="empty_answers"),
    Fact(name="overlap"),
    Fact(name="text_lengths"),
)
REPORTED = Reported(metrics=_METRICS, facts=_FACTS)


def perplexity(loss: float | None) -> float | None:
    """Return the perplexity for a loss in nats. None: no loss, or no float is large enough."""
    if loss is None or loss >= _MOST_NATS:
        return None
    return math.exp(loss)
