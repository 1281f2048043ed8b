"""A real run on two pods learns chats by a template, and its model is asked, answers and stops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench import Cluster, FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.answers.server import close_all
from workbench.results import FineTuneRun

pytestmark = [pytest.mark.slow, pytest.mark.long]

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
COLOURS = {"apple": "red", "pear": "green", "plum": "blue", "lemon": "yellow"}


def chat(fruit: str, other: str) -> list[dict[str, str]]:
    said = [
        ("user", fruit),
        ("assistant", COLOURS[fruit]),
        ("user", other),
        ("assistant", COLOURS[other]),
    ]
    return [{"role": role, "content": content} for role, content in said]


@pytest.fixture(autouse=True)
def no_model_kept() -> Iterator[None]:
    yield
    close_all()


def test_chats_are_learned_on_two_pods_and_answers_end_with_their_turn(
    cluster: Cluster, tmp_path: Path
) -> None:
    chats = [{"messages": chat(fruit, other)} for fruit in COLOURS for other in COLOURS]
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in {"train": chats * 4, "eval": chats[1:9:2]}.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = FineTune(
        model="tiny-llama",
        dataset=str(data),
        technique="ddp",
        max_steps=40,
        learning_rate=5e-3,
        profile_step=0,
        chat_template=TEMPLATE,
        max_target_length=24,
        predict_rows=4,
    )
    with pytest.raises(
        ConfigError, match=r"train\.jsonl, line 1 .*'tiny-llama' has no chat template"
    ):
        cluster.submit(job.replace(chat_template=None))
    run = cluster.submit(job)
    result = run.wait(300, progress=False).raise_for_status()
    assert result.eval_loss is not None and result.first_eval_loss is not None
    assert result.eval_loss < 0.2 * result.first_eval_loss
    assert result.exact_match == 1.0
    saved = json.loads((run.paths.model / "generation_config.json").read_text())
    assert (
        len(saved["eos_token_id"]) == 2
        and (run.paths.model / "chat_template.jinja").read_text() == TEMPLATE
    )
    # Chats, rows that hold their answer, and texts; nothing is written after the end of the turn.
    asked = chat("plum", "pear")
    answers = run.predict([asked[:3], {"messages": asked}, "lemon"], before=True)
    assert answers.texts("after training") == ["green", "green", "yellow"]
    assert answers.texts("before training") != answers.texts("after training")
    assert [row.expected for row in answers] == [None, "green", None]
    with pytest.raises(ConfigError, match=sentence("rows is a single chat")):
        run.predict(asked)
    # Turn by turn: each model goes on from its own answers, which come piece by piece.
    pieces: dict[str, str] = {}

    def add(name: str, piece: str) -> None:
        pieces[name] = pieces.get(name, "") + piece

    talk = run.chat(before=True)
    first = talk.send("plum", add)
    assert (
        list(first) == ["before training", "after training"] and first["after training"] == "blue"
    )
    assert pieces["after training"].strip() == "blue"
    assert talk.send("lemon")["after training"] == "yellow"
    assert "lemon" in str(talk) and "yellow" in str(talk) and "blue" in talk._repr_html_()
    talk.clear()
    assert talk.exchanges == []
    # One question to the models of several runs.
    copies = [tmp_path / "second", tmp_path / "third"]
    for copy in copies:
        shutil.copytree(run.path, copy)
    several = run.chat(before=True, beside=[FineTuneRun.load(copy) for copy in copies])
    told = several.send("plum")
    assert len(told) == 4
    assert [text for name, text in told.items() if name != "before training"] == ["blue"] * 3
    with pytest.raises(ConfigError, match=r"chat\(beside=…\) takes a run of a fine-tuning job"):
        run.chat(beside=[run.path])  # type: ignore[list-item]


CALLS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages "
    "%}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}{{ "
    "c.function.name + ' ' + c.function.arguments | tojson }}{% endfor %}{{ '<|end|>' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_calls_of_a_tool_are_learned_and_written_where_it_is_at_hand(
    cluster: Cluster, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    rows = []
    for fruit, colour in COLOURS.items():
        call = {"function": {"name": "look", "arguments": json.dumps({"at": fruit})}}
        turns = [
            {"role": "user", "content": fruit},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        answered = [
            *turns,
            {"role": "tool", "content": colour},
            {"role": "assistant", "content": f"It is {colour}"},
        ]
        rows += [{"messages": turns, "tools": tools}, {"messages": answered, "tools": tools}]
    for name, several in {"train": rows * 8, "eval": rows}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in several))
    job = FineTune(
        model="tiny-llama",
        dataset=str(tmp_path),
        technique="single",
        max_steps=60,
        learning_rate=5e-3,
        profile_step=0,
        chat_template=CALLS,
        max_target_length=32,
        predict_rows=8,
    )
    run = cluster.submit(job, pods=1)
    result = run.wait(300, progress=False).raise_for_status()
    assert result.exact_match == 1.0 and result.predictions is not None
    assert {row.expected for row in result.predictions} == {
        text
        for fruit, colour in COLOURS.items()
        for text in (f'look {{"at": "{fruit}"}}', f"It is {colour}")
    }
