"""What a chat template refuses is met at the submission, wherever its template is known there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import Example, row_from
from workbench.finetune.job.checked_rows import checked_rows
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.model.limits import TEMPLATE_TOO_SLOW
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec

pytestmark = pytest.mark.slow  # transformers, in children

PUBLISHED = Path(str(find_spec("trl").submodule_search_locations[0])) / "chat_templates"
GEMMA, QWEN, TRL, LLAMA, PHI = (
    (PUBLISHED / f"{name}.jinja").read_text()
    for name in ("gemma", "qwen2_5", "qwen2_5_training", "llama3_1", "phi3")
)


def chat(*roles: str) -> Example:
    return row_from(
        {"messages": [{"role": role, "content": f"word {n}"} for n, role in enumerate(roles)]},
        "here",
    )


def reasons(job: FineTune, rows: Sequence[Example]) -> list[str]:
    with checked_rows(job) as refusal:
        return [refusal(row) for row in rows]


def test_rows_are_refused_by_file_and_line_before_a_run_is_made(tmp_path: Path) -> None:
    system = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    }
    system["messages"].append({"role": "assistant", "content": "Hello."})
    plain = {"messages": system["messages"][1:]}
    for name, rows in {"train": [plain, plain, system], "eval": [plain]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {
        "kind": "files",
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
    }
    job = FineTune(model="tiny-llama", dataset=files, chat_template=GEMMA)
    with pytest.raises(
        ConfigError,
        match=r"train\.jsonl, line 3 cannot be learned from: "
        r"the chat template refuses the turns \(system, user, ",
    ):
        prepare_run(RunSpec(job=job, cluster=ClusterSpec()), root=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # A system turn for every row is one, too.
    rows = [
        row_from({"source": "1+1?", "target": "2"}, "here"),
        row_from({"text": "once upon a time"}, "here"),
    ]
    assert [bool(why) for why in reasons(job.replace(system="Be brief."), rows)] == [True, False]
    assert reasons(job, rows) == ["", ""]


def test_the_template_is_found_in_a_folder_and_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat("user", "assistant"), chat("user", "assistant", "tool", "assistant")]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma"}')
    several = [{"name": "tool_use", "template": QWEN}, {"name": "default", "template": GEMMA}]
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "chat_template": several}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    in_folder = reasons(FineTune(model=str(folder)), rows)
    assert (
        in_folder[0] == ""
        and "(user, assistant, tool, assistant): Conversation roles must alternate" in in_folder[1]
    )

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--me--chat"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1" * 40)
    snapshot = cached / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
    assert reasons(FineTune(model="me/chat"), rows) == in_folder
    assert reasons(FineTune(model="me/other"), rows) == ["", ""], (
        "not known here: the pods refuse it"
    )
    # Nothing is asked where no template is in play.
    assert reasons(
        FineTune(model="tiny-llama"), [row_from({"source": "a", "target": "b"}, "here")]
    ) == [""]


def test_words_that_a_template_refuses_are_met_in_the_first_rows_and_a_share_of_the_rest() -> None:
    picky = GEMMA.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if 'rude' in "
        "message['content'] %}{{ raise_exception('No.') }}{% endif %}",
    )
    job = FineTune(model="tiny-llama", chat_template=picky)
    fine = row_from({"source": "1+1?", "target": "2"}, "here")
    rude = row_from({"source": "1+1?", "target": "a rude word"}, "here")
    whys = reasons(job, [fine] * 20 + [rude] + [fine] * 979 + [rude] * 200)
    assert (
        whys[20]
        == "cannot be learned from: the chat template refuses the turns (user, assistant): No."
    )
    assert not any(whys[21:1000])
    refused = [bool(why) for why in whys[1000:]]
    assert any(refused) and not all(refused), "a thousand in n of the n-th row on"
    assert [bool(why) for why in reasons(job, [fine] * 1000 + [rude] * 200)[1000:]] == refused, (
        "drawn by the seed"
    )


MISTRAL = (Path(__file__).parents[1] / "samples" / "chat" / "mistral.jinja").read_text()


@pytest.mark.parametrize(
    ("template", "asks"),
    [
        (QWEN, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (TRL, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (GEMMA, "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
        (PHI, "<|user|>\nHi<|end|>\n<|assistant|>\n"),
        (MISTRAL, "<s>[INST] Hi [/INST]"),
    ],
    ids=["qwen", "trl", "gemma", "phi", "mistral"],
)
def test_a_prompt_that_the_template_has_written_is_refused_with_the_way_out(
    template: str, asks: str
) -> None:
    job = FineTune(model="tiny-llama", chat_template=template)
    rows = [row_from({"prompt": prompt, "completion": "2"}, "here") for prompt in (asks, "Hi")]
    written, bare = reasons(job, rows)
    assert "has the words with which the chat template asks for an answer" in written
    assert bare == ""
    # Words of the template within a text are no prompt of the template.
    within = row_from({"prompt": f"What does {asks} mean?", "completion": "2"}, "here")
    assert reasons(job, [within]) == [""]
    assert reasons(FineTune(model="tiny-llama", prompt="plain"), rows) == ["", ""]


def test_calls_that_a_template_does_not_know_are_refused_before_a_run() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    turns += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]
    row = row_from(
        {"messages": turns, "tools": [{"name": "add", "description": "", "parameters": {}}]}, "here"
    )
    twice = row_from(
        {"messages": [turns[0], {**turns[1], "tool_calls": [call, call]}, *turns[2:]]}, "here"
    )
    assert reasons(FineTune(model="tiny-llama", chat_template=QWEN), [row, twice]) == ["", ""]
    one, two = reasons(FineTune(model="tiny-llama", chat_template=LLAMA), [row, twice])
    assert one == "" and "This model only supports single tool-calls at once!" in two
    (why,) = reasons(FineTune(model="tiny-llama", chat_template=PHI), [row])
    assert why == (
        "cannot be learned from: the chat template leaves out the "
        "assistant's tool_calls; give one that writes it as chat_template="
    )


def test_templates_that_mark_answers_and_those_that_cannot_be_learned_from() -> None:
    row = [chat("user", "assistant", "user", "assistant")]
    assert reasons(FineTune(model="tiny-llama", chat_template=TRL), row) == [""]
    thinks = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}<assistant><think>"
    )
    (why,) = reasons(FineTune(model="tiny-llama", chat_template=thinks), row)
    assert why.startswith(
        "cannot be learned from: the chat template does "
        "not begin an answer with what it asks for one with"
    )
    (why,) = reasons(
        FineTune(model="tiny-llama", chat_template="{% for m in messages %}{{ m.content }}"), row
    )
    assert "Unexpected end of template" in why


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{% set n = messages | length + 8 %}{{ (n ** (n ** n)) > 1 }}"
MEMORY = "{{ ('x' * (messages | length * 10 ** 10)) | length }}"


@pytest.mark.parametrize("template", [LOOPS, POWER, MEMORY], ids=["loops", "power", "memory"])
def test_a_template_without_an_end_is_refused_with_its_limit(
    template: str,
) -> None:
    job = FineTune(model="tiny-llama", dataset="mini", prompt="chat", chat_template=template)
    why = reasons(job, [chat("user", "assistant"), chat("user", "assistant")])
    assert why == [f"cannot be learned from: {TEMPLATE_TOO_SLOW}"] * 2
