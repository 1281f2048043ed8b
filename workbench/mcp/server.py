"""Serve the tools over stdio with the SDK of the Model Context Protocol."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec

from mcp.server import MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.json_values import json_text
from workbench.base.versions import VERSION
from workbench.base.words import printable
from workbench.mcp.bounds import Bounds
from workbench.mcp.tools import TOOLS, Answer, Tools, options_text

_P = ParamSpec("_P")
# A message ends with what to do: sentences, or the allowed values of a closed set.
_REMEDY = re.compile(r"(?<=[.;])\s+(?=\S)|:\s+(?=did you mean )")
_INSTRUCTIONS = """\
DeepSpeed Workbench fine-tunes language models on pods. A usual session: read \
workbench://options/finetune, call preview and plan with a job, then submit, follow and result. \
A refusal names the option and the remedy. A failed run names its error and remedies in result."""


def serve(root: Path) -> None:
    """Serve an agent on standard input and output until the agent ends the session."""
    server(root).run("stdio")


def server(root: Path) -> MCPServer:
    """Return the server of a folder, without a transport."""
    made = MCPServer("deepspeed-workbench", version=VERSION, instructions=_INSTRUCTIONS)
    tools = Tools(Bounds(root))
    for name, changes in TOOLS.items():
        hints = ToolAnnotations(
            read_only_hint=changes == "reads", destructive_hint=changes == "destroys"
        )
        tool = getattr(tools, name)
        made.add_tool(_answered(tool), name=name, annotations=hints, structured_output=False)
    made.resource("workbench://options/{kind}", description="Options of a kind of job")(
        options_text
    )
    made.resource("workbench://runs/{run}", description="Card of a run")(tools.card)
    return made


def _answered(tool: Callable[_P, Answer]) -> Callable[_P, CallToolResult]:
    """Return a tool with refusals as results, for the agent to read."""

    @functools.wraps(tool)
    def call(*args: _P.args, **options: _P.kwargs) -> CallToolResult:
        try:
            answer = tool(*args, **options)
        except (WorkbenchError, OSError) as error:
            return _result(printable(str(error)), _facts_of(error), is_error=True)
        return _result(answer.text, answer.facts)

    # The SDK makes the schema of the arguments from the signature.
    signature = inspect.signature(tool, eval_str=True).replace(return_annotation=CallToolResult)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _result(text: str, facts: Mapping[str, object], *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(text=text)],
        structured_content=json.loads(json_text(facts)),
        is_error=is_error,
    )


def _facts_of(error: WorkbenchError | OSError) -> dict[str, object]:
    """Return the fields of an error. The first sentence is the problem, the rest the remedy."""
    problem, *rest = _REMEDY.split(printable(str(error)), maxsplit=1)
    facts: dict[str, object] = {
        "error": type(error).__name__,
        "problem": problem,
        "remedy": rest[0] if rest else "",
    }
    if isinstance(error, ConfigError):
        facts |= {"option": error.option, "value": error.value}
    return facts
