"""The tables of options in docs/, read from pydantic models, dataclasses and docstrings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

import workbench
from tools import options

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (
    "FineTune",
    "Script",
    "PodSpec",
    "Cluster",
    "LocalPods",
    "SSHPods",
    "KubernetesPods",
    "Volume",
    "CMLPods",
    "CMLProject",
    "SlurmPods",
    "Benchmark",
)


class Model(BaseModel):
    size: int = Field(description="How many | at most.")
    names: list[str] = Field(default_factory=list, description="Their names.")
    silent: bool = True


def test_a_pydantic_model() -> None:
    size, names, silent = options.options_of(Model)
    assert options.table_of([size, names])[2:] == [
        "| `size` | required | How many \\| at most. |",
        "| `names` | none | Their names. |",
    ]
    assert (silent.default, silent.meaning) == (True, "")


def test_a_record_has_its_fields_with_choices_spelled_out() -> None:
    by_name = {option.name: option for option in options.options_of(workbench.FineTune)}
    assert "`zero3-offload`" in by_name["technique"].meaning
    assert by_name["per_device_train_batch_size"].default == 8
    assert "kind" not in by_name


def function(first: int, *, second: str = "b") -> None:
    """Do it.

    Args:
        first: The first,
            at length.
        second: The second.

    Raises:
        ValueError: Never.
    """


def test_a_functions_arguments() -> None:
    assert [(o.name, o.meaning) for o in options.options_of(function)] == [
        ("first", "The first, at length."),
        ("second", "The second."),
    ]
    assert options.table_of(options.options_of(function))[2].startswith("| `first` | required |")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_option_is_described_and_on_the_page(name: str) -> None:
    thing: Callable[..., object] = options.find(name)
    assert [option.name for option in options.options_of(thing) if not option.meaning] == []
    assert f"<!-- options: {name} -->\n" in (ROOT / "docs" / "options.md").read_text()


def test_a_name_that_is_not_in_the_package_is_an_error() -> None:
    with pytest.raises(LookupError, match="NoSuchRecord is defined in 0 modules"):
        options.find("NoSuchRecord")


@pytest.mark.parametrize("path", options.PAGES, ids=lambda path: path.stem)
def test_the_tables_of_the_pages_are_current(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert options.renewed(page) == page, "run `make options`"


def test_a_stale_table_is_renewed_and_the_text_around_it_stays() -> None:
    page = "# A\n\n<!-- options: Volume -->\n\nstale words\n\n<!-- end -->\n\nBelow.\n"
    new = options.renewed(page)
    assert "stale words" not in new
    assert '| <a id="claim"></a>[`claim`](#claim) | ' in new
    assert new.startswith("# A\n") and new.endswith("<!-- end -->\n\nBelow.\n")


def test_an_option_without_a_description_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find", lambda name: Model)
    with pytest.raises(LookupError, match="options of Model without a description: silent"):
        options.renewed("<!-- options: Model -->\n<!-- end -->")


def test_anchors_are_unique_and_the_first_option_of_a_name_has_the_name_itself() -> None:
    size, names, silent = options.options_of(Model)
    taken = {"names"}  # a heading of the page
    assert options.anchors_of("Model", [size, names, silent], taken) == [
        "size",
        "model-names",
        "silent",
    ]
    assert options.anchors_of("Other", [size], taken) == ["other-size"]
    page = (ROOT / "docs" / "options.md").read_text()
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) > 200
    assert len(set(anchors)) == len(anchors)
    assert "learning-rate" in anchors


def test_every_public_name_is_described_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    described = re.findall(r"^\.\. auto\w+:: (workbench\.[\w.]+)$", page, flags=re.MULTILINE)
    assert sorted(described) == sorted(options.PUBLIC)
    headings = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    assert headings == [path.rpartition(".")[2] for path in described]
