"""Ask the models of runs in child processes (`server.py`), so the kernel loads no framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from workbench.base.errors import ConfigError, shortened
from workbench.base.files import read_json
from workbench.base.messages.rpc import OnPiece
from workbench.finetune.answers.conversation import Conversation
from workbench.finetune.answers.predictions import Answers, Predictions
from workbench.finetune.answers.questions import (
    Question,
    RowLike,
    job_options,
    questions_of,
    tables_of,
)
from workbench.finetune.answers.server import check_model, server_of
from workbench.finetune.data.forms.messages import Message
from workbench.finetune.data.scoring import judge
from workbench.rundir.checkpoints import model_folder
from workbench.rundir.paths import RunPaths

_AT_ONCE, _MOST = 64, 1024  # rows in the first request and in later requests
# Longest wait of an interrupt, except for `_AT_ONCE` rows of a slow model.
_REQUEST_S = 2.0


class _Run(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def paths(self) -> RunPaths: ...


def predict(run: _Run, rows: Sequence[RowLike] | None = None, *, before: bool = False) -> Answers:
    """Return the answers of a run's model, decoded greedily in batches. The model stays loaded."""
    questions = questions_of(run.paths, rows)
    models = [("answered", run, False)]
    if before:
        models = [("before training", run, True), ("after training", run, False)]
    return _ask(models, questions)


def chat(
    run: _Run,
    *,
    before: bool = False,
    beside: Sequence[_Run] = (),
    system: str | None = None,
) -> Conversation:
    """Return a chat with a run's model, beside the untrained model or models of other runs."""
    models: dict[str, tuple[_Run, bool]] = {}
    if before:
        models["before training"] = (run, True)
    if beside:
        runs = [run, *beside]
        for name, each in zip(_names(runs), runs, strict=True):
            models[name] = (each, False)
    else:
        models["after training" if before else "answered"] = (run, False)
    for each, _ in models.values():
        check_model(each.paths)
        _check_template(each.paths)
    for each, _ in models.values():
        server_of(each.paths)

    def ask(name: str, turns: Sequence[Message], on_text: OnPiece | None) -> str:
        each, is_before = models[name]
        question = Question(source=turns[-1]["content"], messages=tuple(turns))
        server = server_of(each.paths)
        reply = server.answer([question], before=is_before, on_text=on_text)
        return reply.texts[0]

    return Conversation(list(models), ask, system=system)


def _check_template(paths: RunPaths) -> None:
    job = job_options(paths)
    prompt = job.get("prompt")
    if prompt not in (None, "chat"):
        raise ConfigError(
            f"the run in {paths.root} asks its model by "
            f"prompt {prompt!r}, not by turns; use run.predict"
        )
    model = model_folder(paths)
    own = read_json(model / "tokenizer_config.json").get("chat_template")
    if not (job.get("chat_template") or own or (model / "chat_template.jinja").is_file()):
        model_name = shortened(job.get("model"))
        raise ConfigError(
            f"model {model_name} of the run in {paths.root} cannot chat, because the model has no "
            "chat template. Ask the model with run.predict(['…'])"
        )


def compare_predictions(
    runs: Sequence[_Run], rows: Sequence[RowLike] | None = None, *, before: bool = False
) -> Answers:
    """Ask the models of several runs for answers to the same rows, side by side.

    Args:
        runs: Runs that left a model.
        rows: Rows as for `predict`. Default: the first run's evaluation rows.
        before: Also ask the first run's model as it was before training.

    Raises:
        RunError: A run left no model, or a model's process failed; includes its last output.
        ConfigError: There is no run, or a row is of no known form.
    """
    if not runs:
        raise ConfigError("runs is empty; give the runs whose answers to compare")
    questions = questions_of(runs[0].paths, rows)
    models = []
    if before:
        models.append(("before training", runs[0], True))
    for name, run in zip(_names(runs), runs, strict=True):
        models.append((name, run, False))
    return _ask(models, questions)


def _ask(models: Sequence[tuple[str, _Run, bool]], questions: Sequence[Question]) -> Answers:
    for _, run, _ in models:
        server_of(run.paths)  # start all servers first, so that their imports overlap
    tables = tables_of([run.paths for _, run, _ in models], questions)
    # Rows of similar length need little padding, and answers of similar length end together.
    order = sorted(range(len(questions)), key=lambda n: len(questions[n].text))
    by_model: list[Predictions] = []
    load_s = answer_s = 0.0
    for _, run, before in models:
        texts: dict[int, str] = {}
        at_once = _AT_ONCE
        while len(texts) < len(order):
            numbers = order[len(texts) : len(texts) + at_once]
            reply = server_of(run.paths).answer([questions[n] for n in numbers], before=before)
            texts.update(zip(numbers, reply.texts, strict=True))
            load_s = load_s + reply.load_s
            answer_s = answer_s + reply.answer_s
            rows_per_s = len(numbers) / max(reply.answer_s, 1e-3)
            at_once = max(_AT_ONCE, min(_MOST, int(rows_per_s * _REQUEST_S)))
        answers = []
        for number, question in enumerate(questions):
            answer = judge(
                question.text,
                question.expected,
                texts[number],
                table=tables.get(question.table_id or ""),
                table_id=question.table_id,
            )
            answers.append(answer)
        by_model.append(Predictions(tuple(answers)))
    return Answers(
        names=[name for name, _, _ in models],
        models=by_model,
        load_s=load_s,
        answer_s=answer_s,
    )


def _names(runs: Sequence[_Run]) -> list[str]:
    jobs = [job_options(run.paths) for run in runs]
    for keys in (
        ("technique",),
        ("model", "technique"),
        ("model", "technique", "seed", "max_steps"),
    ):
        names = [" ".join(str(job.get(key, "?")) for key in keys) for job in jobs]
        if max(Counter(names).values()) == 1:
            return names
    ids = [run.id for run in runs]
    if len(set(ids)) == len(ids):
        return ids
    return [f"{number}: {name}" for number, name in enumerate(ids)]
