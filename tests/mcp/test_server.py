"""`workbench mcp` with the client of the protocol's own SDK, over stdio."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from workbench import Cluster
from workbench.cli import main
from workbench.mcp.tools import TOOLS
from workbench.rundir.status import cluster_status

CLUSTER = {"backend": {"kind": "local"}, "pods": {"cpus": 1}, "count": 2}


class Agent:
    """A session that asserts whether a call is refused."""

    def __init__(self, client: Client):
        self.client = client

    async def call(self, tool: str, **arguments: object) -> dict[str, Any]:
        answer = await self.client.call_tool(tool, arguments)
        assert not answer.is_error, answer.content
        assert answer.content[0].text
        return dict(answer.structured_content)

    async def refused(self, tool: str, **arguments: object) -> dict[str, Any]:
        answer = await self.client.call_tool(tool, arguments)
        assert answer.is_error, answer.structured_content
        facts = dict(answer.structured_content)
        assert answer.content[0].text.startswith(facts["problem"])
        assert answer.content[0].text.endswith(facts["remedy"])
        return facts


@asynccontextmanager
async def agent_in(folder: Path) -> AsyncIterator[Agent]:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "workbench", "mcp"],
        cwd=folder,
        env=dict(os.environ),
    )
    async with Client(stdio_client(server)) as client:
        yield Agent(client)


def session(folder: Path, steps: Callable[[Agent], Awaitable[None]]) -> None:
    async def carry_out() -> None:
        async with agent_in(folder) as agent:
            await steps(agent)

    try:
        anyio.run(carry_out)
    finally:
        # Pods outlive the server, and must not outlive a failed test.
        for path in (folder / "runs").glob("cluster-*"):
            if cluster_status(path).alive:
                Cluster.attach(path).close()


def test_an_agent_reads_the_tools_their_effects_and_the_options(tmp_path: Path) -> None:
    async def steps(agent: Agent) -> None:
        listed = (await agent.client.list_tools()).tools
        assert {tool.name for tool in listed} == set(TOOLS)
        for tool in listed:
            assert tool.description
            confirms = "confirm" in tool.input_schema["properties"]
            assert confirms == bool(tool.annotations and tool.annotations.destructive_hint)
        options = await agent.client.read_resource("workbench://options/finetune")
        assert "max_steps" in options.contents[0].text
        assert "hosts" in (await agent.call("places"))["places"]["ssh"]
        assert (await agent.call("runs"))["runs"] == []
        assert (await agent.call("clusters"))["clusters"] == []

    session(tmp_path, steps)


def test_refusals_carry_the_option_and_the_remedy(tmp_path: Path) -> None:
    async def steps(agent: Agent) -> None:
        facts = await agent.refused("plan", job={"technique": "zero9"})
        assert (facts["error"], facts["option"], facts["value"]) == (
            "ConfigError",
            "technique",
            "zero9",
        )
        assert facts["remedy"].startswith("did you mean 'zero3'?")
        facts = await agent.refused("preview", job={"dataset": "/etc/passwd"})
        assert facts["option"] == "dataset"
        assert "Name a path in this folder" in facts["remedy"]
        facts = await agent.refused("submit", job={"max_step": 3}, cluster=CLUSTER)
        assert "max_steps" in facts["remedy"]
        assert (await agent.call("clusters"))["clusters"] == []
        facts = await agent.refused("result", run="nosuch")
        assert "nosuch" in facts["problem"]
        await agent.refused("follow", run="nosuch", timeout_s=1e9)

    session(tmp_path, steps)


@pytest.mark.slow
def test_an_agent_previews_plans_trains_reads_a_failure_and_mends_it(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer"])
        rows.writerows([f"what is {number} and one", str(number + 1)] for number in range(60))
    (tmp_path / "train.py").write_text(
        "import sys\nprint('asked', sys.argv[1:])\n1 / int(sys.argv[1])\n"
    )

    async def steps(agent: Agent) -> None:
        job = {"model": "tiny-llama", "dataset": "rows.csv", "technique": "ddp", "max_steps": 2}
        seen = await agent.call("preview", job=job)
        assert seen["train_rows"] + seen["eval_rows"] == 60
        assert (await agent.call("plan", job=job, cluster=CLUSTER))["pods"] == 2
        started = await agent.call("submit", job=job, cluster=CLUSTER)
        run = started["run"]
        while not (progress := await agent.call("follow", run=run))["ended"]:
            pass
        assert progress["state"] == "succeeded", progress
        assert (await agent.call("result", run=run))["steps"] == 2

        cluster = str(Path(started["cluster"]).relative_to(tmp_path.resolve()))
        assert (await agent.call("doctor", cluster=cluster))["hosts"]
        failing = {"kind": "script", "path": "train.py", "args": ["0"]}
        failed = (await agent.call("submit", job=failing, attach=cluster))["run"]
        while not (await agent.call("follow", run=failed))["ended"]:
            pass
        result = await agent.call("result", run=failed)
        assert result["state"] == "failed"
        assert result["error"]["kind"] == "ZeroDivisionError"
        assert "asked ['0']" in (await agent.call("logs", run=failed))["log"]
        mended = (await agent.call("submit", job={**failing, "args": ["1"]}, attach=cluster))["run"]
        while not (progress := await agent.call("follow", run=mended))["ended"]:
            pass
        assert progress["state"] == "succeeded"
        assert len((await agent.call("compare", runs=[failed, mended]))["runs"]) == 2
        card = await agent.client.read_resource(f"workbench://runs/{failed}")
        assert "ZeroDivisionError" in card.contents[0].text

        exported = await agent.call("export", run=run, folder="model")
        assert "config.json" in exported["files"]
        await agent.refused("export", run=run, folder="../model")
        for tool, named in (("stop", run), ("delete", run)):
            facts = await agent.refused(tool, run=named)
            assert f"confirm={named!r}" in facts["remedy"]
        await agent.call("delete", run=run, confirm=run)
        assert {each["id"] for each in (await agent.call("runs"))["runs"]} == {failed, mended}
        await agent.refused("close", cluster=cluster)
        await agent.call("close", cluster=cluster, confirm=Path(cluster).name)
        assert (await agent.call("clusters"))["clusters"] == []

    session(tmp_path, steps)


def test_without_the_sdk_the_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["mcp"]) == 2
    assert "'mcp'" in capsys.readouterr().out
