"""Going on with adapters that were trained before: which base they need, and how they were made. Opens their folder."""

from __future__ import annotations

from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, read_given, user_path
from workbench.base.json_values import Json, parse_json, part, text
from workbench.jobs.adapters import Lora
from workbench.jobs.choices import Peft
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import ADAPTERS, TINY_LLAMA, TINY_T5

# peft's names, by ours.
_NAMES = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"} | {
    name: name for name in ("use_rslora", "use_dora", "bias")
}


def on_base(job: FineTune) -> FineTune:
    """Return a job whose model is a folder of adapters as one of their base, with the options they were made with."""
    named = job.lora.get("resume_from")
    folder = user_path(str(named or job.model)).absolute()
    if not named and not is_there(folder / ADAPTERS):
        return job
    if job.peft == Peft.NONE:
        raise ConfigError(
            f"model {job.model!r} holds adapters: give peft='lora' or 'qlora' to go on training them, or merge them "
            "into their base first (run.merge)"
        )
    config = _read(folder)
    made = {name: config[theirs] for name, theirs in _NAMES.items() if theirs in config}
    match made.get("target_modules"):
        case [*names]:
            made["target_modules"] = sorted(map(str, names))
    now, then = Lora.from_dict(job.lora).to_dict(), Lora.from_dict(made).to_dict()
    for name in job.lora:
        if name != "resume_from" and now[name] != then[name]:
            raise ConfigError(
                f"lora {name} is {now[name]!r}, and the adapters in {folder} have {then[name]!r}; drop it"
            )
    base = job.model if named else text(config.get("base_model_name_or_path"))
    return job.replace(model=base, seed=_seed(job, base, config), lora={**made, "resume_from": str(folder)})


def _read(folder: Path) -> Json:
    try:
        return part({"config": parse_json(read_given(folder / ADAPTERS))}, "config")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapters in {folder} cannot be gone on with: {ADAPTERS} is unreadable") from error


def _seed(job: FineTune, base: str, config: Json) -> int:
    seed = text(config.get("revision")).removeprefix("seed-")
    if base not in (TINY_T5, TINY_LLAMA) or not seed.isdigit() or int(seed) == job.seed:
        return job.seed
    if "seed" in job.model_fields_set:
        raise ConfigError(f"the adapters are of {base!r} with seed {seed}, and the job's seed is {job.seed}; drop it")
    return int(seed)
