"""Plans of transformers to cut the layers of a model, read without importing transformers.

The file of a model's configuration class has the plan. The installed transformers may be another
one than that of the pods, so the ranks check the plan of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import read_given

COLUMNS = "colwise"
ROWS = "rowwise"
SUMMED = "replicated_with_grad_allreduce"
"""Style of a whole weight that reads the rank's part of the activations, such as a norm of heads.

The gradients of the ranks add up.
"""
_WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "replicate",
    "rowwise_rep",
    "rowwise_split_input",
)
"""Styles with whole inputs and whole outputs. Their weights stay whole."""
_BASES = ("PreTrainedConfig", "PretrainedConfig")


def check_plan(kind: str, plan: Mapping[str, str]) -> None:
    """Raise ConfigError if a plan cuts no layer of a model, or cuts layers in an unknown way."""
    unknown = set(plan.values()) - {COLUMNS, ROWS, SUMMED, *_WHOLE}
    if unknown:
        raise ConfigError(
            f"tensor_parallel does not know how to cut a {kind!r}: its plan in transformers has "
            f"{', '.join(sorted(unknown))}. Drop tensor_parallel, or use 'zero3' or 'fsdp' instead"
        )
    if not {COLUMNS, ROWS} & set(plan.values()):
        raise ConfigError(
            f"transformers has no plan to cut the layers of a {kind!r}. Drop tensor_parallel, or "
            "use 'zero3' or 'fsdp' instead"
        )


@lru_cache(maxsize=32)
def known_plan(kind: str) -> Mapping[str, str] | None:
    """Return the plan of a type of models; empty without a plan. None: unknown on this machine.

    Example:
        >>> known_plan("no such model") is None
        True
    """
    found = find_spec("transformers")
    if found is None or found.origin is None or not kind.isidentifier():
        return None
    path = Path(found.origin).with_name("models") / kind / f"configuration_{kind}.py"
    try:
        tree = ast.parse(read_given(path))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _assigned(node, "model_type") == kind:
            return _plan_in(node)
    return None


def _plan_in(node: ast.ClassDef) -> Mapping[str, str] | None:
    plan = _assigned(node, "base_model_tp_plan")
    if isinstance(plan, dict):
        return {str(name): str(style) for name, style in plan.items()}
    # Another class may have the plan.
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return {} if plan is None and bases and set(bases) <= set(_BASES) else None


def _assigned(node: ast.ClassDef, name: str) -> object:
    """Return the value of a class attribute; None without one, and "" if it is computed."""
    for line in node.body:
        if not isinstance(line, ast.Assign | ast.AnnAssign) or line.value is None:
            continue
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        if not any(isinstance(each, ast.Name) and each.id == name for each in targets):
            continue
        try:
            value: object = ast.literal_eval(line.value)
        except ValueError:
            return ""
        return value
    return None
