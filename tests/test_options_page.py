"""The page of options: what is read from pydantic models, from dataclasses and from docstrings."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel, Field

import workbench

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
    "Benchmark",
)


@pytest.fixture(scope="module")
def options() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "options_directive", ROOT / "docs" / "_ext" / "options.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Model(BaseModel):
    size: int = Field(description="How many | at most.")
    names: list[str] = Field(default_factory=list, description="Their names.")
    silent: bool = True


def test_a_pydantic_model(options: ModuleType) -> None:
    size, names, silent = options.options_of(Model)
    assert options.table_of([size, names])[2:] == [
        "| `size` | required | How many \\| at most. |",
        "| `names` | none | Their names. |",
    ]
    assert (silent.default, silent.meaning) == (True, "")


def test_a_record_has_its_fields_with_choices_spelled_out(options: ModuleType) -> None:
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


def test_a_functions_arguments(options: ModuleType) -> None:
    assert [(o.name, o.meaning) for o in options.options_of(function)] == [
        ("first", "The first, at length."),
        ("second", "The second."),
    ]
    assert options.table_of(options.options_of(function))[2].startswith("| `first` | required |")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_option_is_described_and_on_the_page(options: ModuleType, name: str) -> None:
    thing: Callable[..., object] = options.find(name)
    assert [option.name for option in options.options_of(thing) if not option.meaning] == []
    assert f"```{{options}} {name}\n" in (ROOT / "docs" / "options.md").read_text()


def test_a_name_that_is_not_in_the_package_is_an_error(options: ModuleType) -> None:
    with pytest.raises(LookupError, match="NoSuchRecord is defined in 0 modules"):
        options.find("NoSuchRecord")
