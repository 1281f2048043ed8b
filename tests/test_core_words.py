"""No word of fine-tuning stands in the core: a kind of job brings its own figures and columns.

The contract of imports keeps the modules of `finetune/` out of the core. Names and strings could
walk around the contract, so they are read here. Documentation strings may give examples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
CORE = ("base", "jobs", "pods", "rundir", "agent", "keeper", "handover", "client")
WORDS = [
    "aux_loss",
    "chosen_answers",
    "completions",
    "dpo",
    "empty_answers",
    "encoder_decoder",
    "entropy",
    "exact_match",
    "execution_match",
    "grpo",
    "kl",
    "kto",
    "log_odds",
    "logical_match",
    "lora",
    "loss_on",
    "margins",
    "max_source_length",
    "max_target_length",
    "nll_loss",
    "orpo",
    "padded_tokens",
    "peft",
    "perplexity",
    "profiled_tokens",
    "qlora",
    "rejected",
    "reward",
    "rewards",
    "rouge",
    "seq2seq",
    "source_length",
    "sql",
    "t5",
    "target_length",
    "text_lengths",
    "token_loss",
    "useful_tokens",
    "wikisql",
]
"""Words of a fine-tuning job. Model, technique and precision are no such words: `JobViews.facts`
and `JobViews.table_columns` ask every kind of job for them."""
WORD = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(WORDS)})(?![A-Za-z0-9])", re.IGNORECASE)
ALLOWED = {
    # Libraries that warm servers import before a rank needs them, by the names of their modules.
    ("agent/imports.py", "peft"),
    ("agent/imports.py", "seq2seq"),
    ("agent/imports.py", "t5"),
    # A key of `result.json` that the program reads back, so its value is not masked.
    ("base/redact.py", "peft"),
    # Examples of a folder in messages about a path.
    ("handover/kubeflow/options.py", "wikisql"),
    ("pods/kubernetes/manifests/volumes.py", "wikisql"),
}


def spoken(tree: ast.Module) -> Iterator[str]:
    """Yield each name and each string of a module, except documentation strings."""
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield text
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def words_in(source: str) -> set[str]:
    return {word.lower() for text in spoken(ast.parse(source)) for word in WORD.findall(text)}


def test_the_core_does_not_spell_fine_tuning() -> None:
    found = set()
    for room in CORE:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for word in words_in(path.read_text()):
                found.add((path.relative_to(PACKAGE).as_posix(), word))
    assert found - ALLOWED == set()
    assert found >= ALLOWED, "an exception that no file needs"


@pytest.mark.parametrize(
    "source",
    ["x = 'exact_match'", "self._rewards_of_pairs", "def loss_on(): ...", "f(peft=1)", "T5 = 1"],
)
def test_the_scan_sees_names_and_strings(source: str) -> None:
    assert len(words_in(source)) == 1


def test_the_scan_leaves_out_documentation_and_longer_words() -> None:
    assert words_in('"""About perplexity."""\nbacklog = "pickled rewarding overlapping"') == set()
