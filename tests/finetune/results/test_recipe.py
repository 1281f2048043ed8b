from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.forkedruns import Plan
from tests.support.scripts import script_job
from tests.support.sentences import says
from workbench.base.files import write_json
from workbench.client.result import RunResult
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.data.wikisql.datasets import Mini
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.export.recipe import recipe_of, script_recipe_of
from workbench.finetune.job.finetune import FineTune
from workbench.jobs.registry import job_from_dict
from workbench.jobs.requirements.requirements import Requirements
from workbench.jobs.script import Script
from workbench.jobs.script_folder import zip_script
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import HostSlots
from workbench.rundir.state import RunState

VERSIONS = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
}
ZERO1 = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1000000,
}


def make_run(
    root: Path, job: FineTune | Script, env: Mapping[str, str] | None = None, rows: int = 40
) -> RunResult:
    paths = RunPaths(root)
    paths.inputs.mkdir(parents=True)
    spec = {
        "cluster": {"pods": {"env": {"NCCL_DEBUG": "a b"}}},
        "job": {**job.to_dict(), "env": dict(env or {})},
    }
    paths.spec.write_text(json.dumps(spec))
    paths.hostfile.write_text("10.0.0.1 slots=1\n10.0.0.2 slots=1\n")
    hosts = (HostSlots(address="10.0.0.1", slots=1), HostSlots(address="10.0.0.2", slots=1))
    if isinstance(job, FineTune):
        prepare(Mini(train_rows=rows, eval_rows=10), paths.inputs)
        deepspeed = ZERO1 if job.technique == "zero1" else None
        told = {
            "job": choose(job, gpus=0).to_dict(),
            "train": "train.jsonl",
            "eval": "eval.jsonl",
            "hub": None,
            "deepspeed": deepspeed,
        }
        paths.job.write_text(json.dumps(told))
        paths.deepspeed.write_text(json.dumps(deepspeed))
    return RunResult(
        path=root, state=RunState.SUCCEEDED, hosts=hosts, world_size=2, versions=VERSIONS
    )


def test_a_recipe_carries_all_that_it_takes(tmp_path: Path) -> None:
    result = make_run(tmp_path, FineTune())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    recipe = recipe_of(result)
    assert set(recipe.files) == {
        "train.py",
        "lean_loss.py",
        "lines.py",
        "order.py",
        "tiny_t5.py",
        "job.json",
        "deepspeed.json",
        "hostfile",
        "requirements.txt",
        "train.jsonl",
        "eval.jsonl",
        "tokenizer/tokenizer.json",
    }
    assert (
        recipe.files["requirements.txt"]
        == b"torch==2.13.0\ndeepspeed==0.19.8\ntransformers==5.23.0\n"
    )
    assert b"import workbench" not in recipe.files["train.py"]
    assert b"from workbench" not in recipe.files["train.py"]
    with zipfile.ZipFile(io.BytesIO(recipe.archive)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == dict(recipe.files)
    assert recipe.archive == recipe_of(result).archive
    for line in (
        "python3.11 -m venv .venv",
        ".venv/bin/pip install -r requirements.txt "
        "--extra-index-url https://download.pytorch.org/whl/cpu",
        ".venv/bin/deepspeed --hostfile hostfile --force_multi --no_local_rank train.py",
        ".venv/bin/torchrun --nproc-per-node 2 train.py",
        ': "${NCCL_DEBUG:?set it first; its value is not kept}"',
    ):
        assert line in recipe.commands.splitlines()


def test_the_commands_are_shell_and_hold_no_value(tmp_path: Path) -> None:
    env = {"HEADER": "Bearer ${HF_TOKEN}", "A": "x'; rm -rf /; '"}
    recipe = recipe_of(make_run(tmp_path, FineTune(), env=env))
    assert ': "${HF_TOKEN:?' in recipe.commands
    assert "rm -rf" not in recipe.commands
    subprocess.run(["sh", "-n"], input=recipe.commands, text=True, check=True)
    exports = "\n".join(
        line for line in recipe.commands.splitlines() if line.startswith(("export", ":"))
    )
    given = {**os.environ, "HF_TOKEN": "t", "A": "$(a)", "NCCL_DEBUG": "n"}
    run = subprocess.run(
        ["sh", "-ec", f'{exports}\nprintf "%s|%s" "$A" "$HEADER"'], env=given, stdout=-1, check=True
    )
    assert run.stdout == b"$(a)|Bearer t"
    del given["HF_TOKEN"]
    assert subprocess.run(["sh", "-ec", exports], env=given, stderr=-1).returncode != 0


@pytest.mark.parametrize(
    ("env", "versions"),
    [
        ({"X;touch PWN;Y": "1"}, {}),
        ({"A$(touch PWN)": "2"}, {}),
        ({"A": "$(touch PWN)", "B": "${X;touch PWN}", "C": '"; touch PWN; "'}, {}),
        ({}, {"python": "3.11\ntouch PWN\n#"}),
        ({}, {"python": "3.11; touch PWN #"}),
        ({}, {"torch": "2.13.0\n--index-url http://evil/simple"}),
        ({}, {"deepspeed": "0.19 ; touch PWN", "torch": "+cpu`touch PWN`"}),
    ],
)
def test_a_run_of_somebody_else_puts_nothing_into_the_commands(
    tmp_path: Path, env: dict[str, str], versions: dict[str, str]
) -> None:
    result = replace(make_run(tmp_path / "run", FineTune(), env=env), versions=VERSIONS | versions)
    recipe = recipe_of(result)
    assert b"index-url" not in recipe.files["requirements.txt"]
    assert b"PWN" not in recipe.files["requirements.txt"]
    (tmp_path / "here").mkdir()
    harmless = {
        "PATH": str(tmp_path),
        "A": "1",
        "B": "1",
        "C": "1",
        "NCCL_DEBUG": "1",
    }  # no program of the recipe is found
    touch = 'touch() { : > "$1"; }\n'
    subprocess.run(
        ["/bin/sh", "-c", touch + recipe.commands], cwd=tmp_path / "here", env=harmless, stderr=-1
    )
    assert list((tmp_path / "here").iterdir()) == []


def test_what_cannot_be_carried_is_said(tmp_path: Path) -> None:
    result = make_run(tmp_path / "tiny", FineTune())
    assert any("tokenizer" in line for line in recipe_of(result).differs)
    (RunPaths(result.path).inputs / "train.jsonl").unlink()
    (RunPaths(result.path).inputs / "eval.jsonl").unlink()
    assert any(
        says(line, "write them to train.jsonl and eval.jsonl") for line in recipe_of(result).differs
    )
    folder = tmp_path / "a model"
    result = make_run(tmp_path / "folder", FineTune(model=str(folder)))
    assert any(
        f"the model {folder} is loaded from a folder" in line for line in recipe_of(result).differs
    )
    local = replace(result, hosts=(HostSlots(address="127.0.0.2", slots=2),))
    assert any(
        says(line, "the hosts were pods on one machine") for line in recipe_of(local).differs
    )


def test_many_rows_are_fetched_and_checked(tmp_path: Path) -> None:
    result = make_run(tmp_path / "a run", FineTune())
    paths = RunPaths(result.path)
    (paths.inputs / "train.jsonl").write_bytes(os.urandom(4 << 20))
    recipe = recipe_of(result)
    assert "train.jsonl" not in recipe.files
    assert len(recipe.archive) < 1 << 20
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "rows.sha256").write_bytes(recipe.files["rows.sha256"])
    fetch = [
        line for line in recipe.commands.splitlines() if line.startswith(("cp ", "sha256sum "))
    ]
    subprocess.run(
        ["sh", "-ec", "\n".join(fetch)], cwd=tmp_path / "here", check=True, capture_output=True
    )


def test_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    result = replace(make_run(tmp_path, FineTune(technique="single")), world_size=1)
    assert recipe_of(result).commands.endswith("# the one rank\n.venv/bin/python train.py")


def test_a_script_is_carried_as_it_was_submitted_with_its_folder_and_arguments(
    tmp_path: Path,
) -> None:
    script = tmp_path / "own" / "ring.py"
    (script.parent / "lib").mkdir(parents=True)
    script.write_text("print('ring')\n")
    (script.parent / "lib" / "a.py").write_text("pass\n")
    result = make_run(tmp_path / "run", Script(path=str(script), args=["--name", "a b"]))
    RunPaths(result.path).script.write_bytes(zip_script(script))
    script.write_text("changed since")
    recipe = script_recipe_of(result)
    assert recipe.files["ring.py"] == b"print('ring')\n"
    assert recipe.files["lib/a.py"] == b"pass\n"
    assert ".venv/bin/torchrun --nproc-per-node 2 ring.py --name 'a b'" in recipe.commands
    RunPaths(result.path).script.unlink()
    recipe = script_recipe_of(RunResult(path=tmp_path / "run", state=RunState.FAILED))
    assert "ring.py" not in recipe.files
    assert any(says(line, "is not in the run directory") for line in recipe.differs)


def test_a_module_is_started_as_one(tmp_path: Path) -> None:
    script = tmp_path / "own" / "pkg" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text("pass\n")
    job = Script(module="pkg.train", folder=str(tmp_path / "own"), args=["--lr", "1"])
    result = make_run(tmp_path / "run", job)
    RunPaths(result.path).script.write_bytes(zip_script(script, tmp_path / "own"))
    recipe = script_recipe_of(result)
    assert recipe.files["pkg/train.py"] == b"pass\n"
    assert ".venv/bin/torchrun --nproc-per-node 2 -m pkg.train --lr 1" in recipe.commands
    assert "--no_local_rank --module pkg.train --lr 1" in recipe.commands
    assert not any(says(line, "is not in the run directory") for line in recipe.differs)


def test_the_packages_of_a_script_are_installed_after_those_of_its_pods(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", script_job(path="ring.py", requirements=["trl==1.16.0"]))
    needs = Requirements(source="requirements", lines=["trl==1.16.0"])
    write_json(RunPaths(result.path).requirements, needs.facts())
    recipe = script_recipe_of(result)
    assert recipe.files["script-requirements.txt"] == b"trl==1.16.0\n"
    first, second = [line for line in recipe.commands.splitlines() if "pip install -r" in line]
    assert "-r requirements.txt" in first
    assert second == ".venv/bin/pip install -r script-requirements.txt"
    assert not any("saw none of the pods' packages" in line for line in recipe.differs)
    write_json(RunPaths(result.path).requirements, replace(needs, isolated=True).facts())
    differs = script_recipe_of(result).differs
    assert any("saw none of the pods' packages" in line for line in differs)


def test_what_a_foreign_spec_names_is_not_read(tmp_path: Path) -> None:
    key = tmp_path / "home" / "id_ed25519"
    key.parent.mkdir()
    key.write_text("canary")
    result = make_run(tmp_path / "run", Script(path=str(key)))
    with zipfile.ZipFile(RunPaths(result.path).script, "w") as archive:
        archive.writestr("../../escape", "x")
        archive.writestr("/etc/passwd", "x")
        archive.writestr("fine.py", "x")
    recipe = script_recipe_of(result)
    assert set(recipe.files) == {"fine.py", "hostfile", "requirements.txt"}
    assert b"canary" not in b"".join(recipe.files.values())
    page = result.to_html(tmp_path / "card.html").read_text()
    assert "canary" not in page


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (FineTune(technique="fsdp"), "technique 'fsdp'"),
        (FineTune(technique="local-sgd"), "technique 'local-sgd'"),
        (FineTune(peft="lora"), "peft 'lora'"),
        (
            FineTune(technique="single", device_map="auto", max_memory={0: "2GiB"}),
            "layers spread by device_map",
        ),
        (
            FineTune(model="tiny-llama", technique="ddp", peft="qlora"),
            "a causal model and peft 'qlora'",
        ),
        (FineTune(optimizer="adamw-8bit"), "optimizer 'adamw-8bit'"),
        (FineTune(eval_steps=2, load_best_model_at_end=True), "the best model"),
        (FineTune(eval_steps=2, early_stopping_patience=1), "an early stop"),
    ],
)
def test_what_the_script_does_not_know_is_said_and_repeated_with_this_project(
    tmp_path: Path, job: FineTune, said: str
) -> None:
    result = make_run(tmp_path / "run", job)
    recipe = recipe_of(result)
    assert f"does not know {said}: this recipe needs the project" in recipe.differs[0]
    assert "train.py" not in recipe.files
    assert (
        '"$WORKBENCH"/.venv/bin/python -m workbench run spec.json --out repeated'
        in recipe.commands.splitlines()
    )
    subprocess.run(["sh", "-n"], input=recipe.commands, text=True, check=True)
    spec = json.loads(recipe.files["spec.json"])
    again = job_from_dict(spec["job"])
    assert again.replace(dataset=job.dataset) == job
    (tmp_path / "here" / "inputs").mkdir(parents=True)
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / "here" / name).write_bytes(recipe.files[name])
    assert again.dataset == {"kind": "files", "train": "train.jsonl", "eval": "eval.jsonl"}
    files = {
        "train": str(tmp_path / "here" / "train.jsonl"),
        "eval": str(tmp_path / "here" / "eval.jsonl"),
    }
    prepared = prepare(dataset_from({"kind": "files", **files}), tmp_path / "here" / "inputs")
    assert prepared.train is not None
    assert (
        prepared.train.read_bytes() == (RunPaths(result.path).inputs / "train.jsonl").read_bytes()
    )


def test_a_metric_of_ones_own_lies_beside_the_spec(tmp_path: Path) -> None:
    result = make_run(
        tmp_path / "run", FineTune(peft="lora", metrics=["rouge", "/home/me/scores.py:score"])
    )
    file = RunPaths(result.path).job
    sent = {
        "metrics": [
            {"path": "/home/me/scores.py", "function": "score", "source": "def score(p, r): ..."}
        ]
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "metric_inputs": sent}))
    recipe = recipe_of(result)
    assert recipe.files["metric-1.py"] == b"def score(p, r): ..."
    assert json.loads(recipe.files["spec.json"])["job"]["metrics"] == ["rouge", "metric-1.py:score"]


def test_the_rewards_of_a_method_lie_beside_the_spec(tmp_path: Path) -> None:
    job = FineTune(model="tiny-llama", method="grpo", rewards=["/home/me/judge.py:judge"])
    result = make_run(tmp_path / "run", job)
    sent = {"function": "judge", "path": "/home/me/judge.py", "source": "def judge(c): ..."}
    file = RunPaths(result.path).job
    file.write_text(json.dumps({**json.loads(file.read_text()), "rewards": [sent]}))
    recipe = recipe_of(result)
    assert recipe.files["reward-1.py"] == b"def judge(c): ..."
    assert json.loads(recipe.files["spec.json"])["job"]["rewards"] == ["reward-1.py:judge"]
    assert any("method 'grpo'" in text for text in recipe.differs)


CONFIGURED = {
    **ZERO1,
    "gradient_clipping": 0.5,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
    },
}


@pytest.mark.parametrize(
    ("options", "deepspeed"),
    [
        ({"technique": "single"}, None),
        ({"technique": "single", "optimizer": "sgd", "gradient_checkpointing": True}, None),
        ({"technique": "ddp", "gradient_accumulation_steps": 3, "precision": "bf16"}, None),
        ({"technique": "ddp", "max_steps": 60, "eval_steps": 20}, None),
        ({"technique": "zero1", "optimizer": "sgd"}, ZERO1),
        ({"technique": "zero1", "gradient_accumulation_steps": 2}, CONFIGURED),
    ],
)
def test_the_recipe_trains_with_the_options_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Mapping[str, object],
    deepspeed: object,
) -> None:
    import accelerate
    import transformers

    from workbench.finetune.train import settings

    known = transformers.Seq2SeqTrainingArguments.__dataclass_fields__
    defaults = {name: field.default for name, field in known.items()}

    class Taken(Exception):
        __dataclass_fields__ = known

        def __init__(self, **given: object) -> None:
            self.options = defaults | given
            raise self

    result = make_run(tmp_path, FineTune(**options))  # type: ignore[arg-type]
    paths = RunPaths(result.path)
    paths.job.write_text(json.dumps({**json.loads(paths.job.read_text()), "deepspeed": deepspeed}))
    (tmp_path / "recipe").mkdir()
    for name, content in recipe_of(result).files.items():
        (tmp_path / "recipe" / name).write_bytes(content)
    monkeypatch.setenv("WORKBENCH_RUN_DIR", str(paths.job.parent))
    for name in (
        "TOKENIZERS_PARALLELISM",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "0")  # what the script itself sets, put back afterwards
    monkeypatch.setattr(accelerate, "PartialState", lambda *_args, **_options: None)
    # By its name: transformers replaced itself among the modules while it was imported.
    monkeypatch.setattr("transformers.Seq2SeqTrainingArguments", Taken)
    monkeypatch.setattr(settings, "Seq2SeqTrainingArguments", Taken)
    with pytest.raises(Taken) as run:
        settings.training_arguments(settings.Assignment.read())
    monkeypatch.syspath_prepend(tmp_path / "recipe")  # as Python does for a script
    with pytest.raises(Taken) as repeated:
        runpy.run_path(str(tmp_path / "recipe" / "train.py"), run_name="__main__")
    own = {"output_dir", "run_name", "report_to"}  # where it writes, and to whom it reports
    differing = {
        name for name in defaults if run.value.options[name] != repeated.value.options[name]
    }
    assert differing <= own
    assert run.value.options["warmup_steps"] == (7 if deepspeed is CONFIGURED else 0.1)


# Technique, ranks and steps; 30 are enough that another warm-up makes another curve.
RUNS = {
    "zero1": ("zero1", 2, 4),
    "ddp": ("ddp", 2, 4),
    "single": ("single", 1, 30),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RunResult]:
    """A finished run of each technique that the recipe's script knows; forks of one process."""
    results = {}
    root = tmp_path_factory.mktemp("ran")
    plan = Plan(root)
    for name, (technique, ranks, steps) in RUNS.items():
        job = FineTune(
            technique=technique,
            max_steps=steps,
            eval_steps=2,
            per_device_train_batch_size=4,
            profile_step=0,
        )
        result = replace(make_run(root / name, job), world_size=ranks)
        paths = RunPaths(result.path)
        told = json.loads(paths.job.read_text())
        told |= {name: str(paths.inputs / f"{name}.jsonl") for name in ("train", "eval")}
        (result.path / "job.json").write_text(json.dumps(told))
        plan.runs.append({"folder": str(result.path), "world_size": ranks})
        results[name] = result
    for name, run in plan.run().items():
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        losses = {e["step"]: float(str(e["eval_loss"])) for e in run.data("eval")}
        (run.folder / "out" / "model").rename(RunPaths(run.folder).model)
        results[name] = replace(
            results[name], first_eval_loss=losses[0], eval_loss=losses[RUNS[name][2]]
        )
    return results


def unpacked(result: RunResult, folder: Path) -> Path:
    with zipfile.ZipFile(io.BytesIO(recipe_of(result).archive)) as archive:
        archive.extractall(folder)
    return folder


def repeats(result: RunResult, folder: Path, printed: str) -> None:
    """Hold the losses and weights of a recipe in its folder to those of the run."""
    losses = [result.first_eval_loss, result.eval_loss]
    assert f"{{'eval_loss here': {losses}, 'in the run': {losses}}}" in printed
    weights = "model.safetensors"
    assert (folder / "model" / weights).read_bytes() == (
        RunPaths(result.path).model / weights
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_the_recipe_repeats_the_run_under_torchrun_to_the_last_digit(
    ran: Mapping[str, RunResult], tmp_path: Path
) -> None:
    result = ran["zero1"]
    folder = unpacked(result, tmp_path / "repeated")
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    run = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    repeats(result, folder, run.stdout)


@pytest.mark.slow
@pytest.mark.long
def test_the_recipe_repeats_the_runs_of_other_techniques_to_the_last_digit(
    ran: Mapping[str, RunResult], tmp_path: Path
) -> None:
    plan = Plan(tmp_path)
    folders = {}
    for name in ("ddp", "single"):
        folders[name] = unpacked(ran[name], tmp_path / f"recipe-{name}")
        (tmp_path / name).mkdir()
        script = str(folders[name] / "train.py")
        run = {"folder": str(tmp_path / name), "world_size": RUNS[name][1], "script": script}
        plan.runs.append(run)
    for name, run in plan.run().items():
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        repeats(ran[name], folders[name], (run.folder / "rank-0" / "stdout.log").read_text())
