"""Five models to start with: one table, in `gpus_for`, README and the page of models."""

from __future__ import annotations

from pathlib import Path

from tests.support.views import EXAMPLES
from tools.models import MODELS, row_of
from workbench.base.display_protocol import as_html, as_text
from workbench.finetune.plan.gpus import START_MODELS, GpuTable

ROOT = Path(__file__).resolve().parents[3]


def line_of(name: str) -> str:
    parameters, *sizes = START_MODELS[name]
    return f"| `{name}` | {parameters:.2f} B | {' | '.join(f'{size:.1f}' for size in sizes)} |"


def test_pages_and_view_have_the_table() -> None:
    assert [*MODELS] == [*START_MODELS]
    for page in ("README.md", "docs/choose-model.md"):
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        assert [
            line for line in lines if line.startswith(("| `Qwen", "| `meta", "| `Hugging"))
        ] == [line_of(name) for name in START_MODELS]
    view = EXAMPLES[GpuTable](ROOT)
    for name in START_MODELS:
        assert name in as_text(view)
        assert name in as_html(view)


def test_the_smallest_model_needs_what_the_table_says() -> None:
    name = next(iter(START_MODELS))
    assert row_of(name) == line_of(name)
