"""Write a recipe to repeat a run without this project: files, shell commands and known differences.

The run directory may belong to another person. Nothing outside the directory is read, and values
are checked before they become part of a command.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from workbench.base import entries
from workbench.base.child import HOME
from workbench.base.files import read_json
from workbench.base.files.gate import open_within, read_within
from workbench.base.json_values import as_list, as_objects, as_str, get_object
from workbench.base.package import zip_contents
from workbench.base.redact import Redactor, mask_secrets
from workbench.finetune.methods.registry import repeats
from workbench.finetune.model.shapes import model_config
from workbench.finetune.options.metrics import carried_metrics
from workbench.finetune.options.model.models import TINY_T5
from workbench.finetune.techniques.registry import has_recipe, runs_alone
from workbench.jobs.script import references
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.spec import hide_values, stored

# Maximum compressed bytes of training rows in a card.
_MOST_DATA = 3 << 20
# Maximum bytes of rows to read.
_MOST_ROWS = 512 << 20
# Maximum bytes of a script's folder in a card.
_MOST_SCRIPT = 20 << 20
_VERSION = re.compile(
    r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-zA-Z0-9]+([._-][a-zA-Z0-9]+)*)?"
)
_IMPORTED = ("lean_loss", "lines", "order", "tiny_t5")
"""Files of the project imported by the script of a card."""
_IN_PACKAGE = b"from workbench.finetune.recipe."
"""Start of their imports. In a card all files are in the same folder."""
_PINNED = ("torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Files and commands to repeat a run without this project and without the run directory."""

    files: Mapping[str, bytes]
    """Files of a single folder, by name."""
    commands: str
    same: Sequence[str]
    differs: Sequence[str]
    """Differences, and parts to fetch from elsewhere."""

    @property
    def archive(self) -> bytes:
        """Zip of the files. The same files produce the same bytes."""
        return zip_contents(dict(sorted(self.files.items())))


def recipe_of(result: ResultRecord) -> Recipe:
    """Return the recipe of a fine-tuning run."""
    return _masked_recipe(_finetune(_checked(result), RunPaths(result.path)))


def script_recipe_of(result: ResultRecord) -> Recipe:
    """Return the recipe of a script's run."""
    return _masked_recipe(_script(_checked(result), RunPaths(result.path)))


def _checked(result: ResultRecord) -> ResultRecord:
    """Leave out versions that PEP 440 does not allow.

    Versions become lines of requirements.txt and of a command.
    """
    versions = {
        name: version for name, version in result.versions.items() if _VERSION.fullmatch(version)
    }
    return replace(result, versions=versions)


def _masked_recipe(recipe: Recipe) -> Recipe:
    """Mask secrets in a recipe."""
    files = {name: _masked(name, content) for name, content in recipe.files.items()}
    hidden = [name for name, content in recipe.files.items() if files[name] != content]
    differs = [
        *recipe.differs,
        *(f"what looks like a secret is masked in {name}" for name in hidden),
    ]
    return replace(
        recipe,
        files=files,
        differs=differs,
        commands=mask_secrets(recipe.commands),
    )


def _masked(name: str, content: bytes) -> bytes:
    # Rows and tokenizers are data: a mask would change the training.
    if name.endswith(".jsonl") or name.startswith("tokenizer/"):
        return content
    return Redactor().blob(content)


def _finetune(result: ResultRecord, paths: RunPaths) -> Recipe:
    resolved = read_json(paths.job)
    options = {**get_object(resolved, "job"), "env": {}}
    beyond = _beyond(options, paths, as_str(resolved.get("family")))
    if beyond:
        return _with_workbench(result, paths, resolved, beyond)
    losses = [result.first_eval_loss, result.eval_loss]
    carried = {
        "job": options,
        "deepspeed": resolved.get("deepspeed"),
        "eval_losses": losses,
    }
    if options.get("model") == TINY_T5:
        carried["shape"] = model_config(TINY_T5)
    files = {
        **_program(),
        "job.json": json.dumps(carried, indent=1).encode(),
        **_common(result, paths),
    }
    differs: list[str] = []
    files |= _there(paths, paths.deepspeed)
    fetched = _add_rows(files, differs, paths, resolved)
    revision = as_str(options.get("model_revision"))
    _add_tokenizer(files, differs, paths, str(options.get("model", "")), revision)
    lines = [
        *_install(result),
        *fetched,
        *_environment(paths),
        *_start(result, ["train.py"], options),
    ]
    return Recipe(
        files=files,
        commands="\n".join(lines),
        same=_SAME,
        differs=[*differs, *_DIFFERS, *_places(result)],
    )


def _beyond(job: Mapping[str, object], paths: RunPaths, family: str) -> Sequence[str]:
    trained = read_json(paths.model / "config.json")
    if family:
        causal = family == "causal"
    elif trained:
        causal = not trained.get("is_encoder_decoder")
    else:
        causal = "llama" in str(job.get("model", "")).lower()
    parts = {
        "a causal model": causal,
        f"method {job.get('method')!r}": not repeats(job.get("method", "sft")),
        f"technique {job.get('technique')!r}": not has_recipe(job.get("technique")),
        f"peft {job.get('peft')!r}": job.get("peft", "none") != "none",
        f"optimizer {job.get('optimizer')!r}": job.get("optimizer", "adamw")
        not in ("adamw", "sgd"),
        "going on from a checkpoint": bool(job.get("resume")),
        "the best model": bool(job.get("load_best_model_at_end")),
        "recomputed layers by name": bool(job.get("checkpoint_layers")),
        "activations kept by recomputed layers": bool(job.get("checkpoint_policy")),
        "Liger's kernels": bool(get_object(job, "training").get("use_liger_kernel")),
        "linear layers in float8": bool(job.get("float8")),
        "layers spread by device_map": bool(job.get("device_map")),
        "an early stop": job.get("early_stopping_patience") is not None,
    }
    return [name for name, there in parts.items() if there]


def _with_workbench(
    result: ResultRecord,
    paths: RunPaths,
    resolved: Mapping[str, object],
    beyond: Sequence[str],
) -> Recipe:
    """Return a recipe with this project as a requirement: the run's spec.json beside the rows."""
    spec = stored(read_json(paths.spec))
    files = _common(result, paths)
    differs: list[str] = []
    job = dict(get_object(spec, "job"))
    fetched: Sequence[str] = ()
    if resolved.get("train"):
        fetched = _add_rows(files, differs, paths, resolved)
        dataset = {"kind": "files"}
        for name in ("train", "eval"):
            if resolved.get(name):
                dataset[name] = f"{name}.jsonl"
        job["dataset"] = dataset
    if as_str(job.get("deepspeed")):
        own = _there(paths, paths.deepspeed)
        if own:
            files |= own
            job["deepspeed"] = "deepspeed.json"
    sent = as_objects(get_object(resolved, "metric_inputs").get("metrics"))
    job["metrics"], metrics = carried_metrics(
        [as_str(metric) for metric in as_list(job.get("metrics"))], sent
    )
    files |= metrics
    if job.get("rewards"):
        named = [as_str(reward) for reward in as_list(job.get("rewards"))]
        judging = as_objects(resolved.get("rewards"))
        job["rewards"], rewards = carried_metrics(named, judging, stem="reward")
        files |= rewards
    files["spec.json"] = json.dumps({**spec, "job": job}, indent=1).encode()
    if Path(str(job.get("model", ""))).is_absolute():
        differs.append(
            f"the model {job['model']} is a folder of the "
            "machine where the run was started: copy it"
        )
    start = [
        "# WORKBENCH is a checkout of DeepSpeed Workbench in which `make setup` has been done",
        ': "${WORKBENCH:?set it first}"',
        '"$WORKBENCH"/.venv/bin/python -m workbench run spec.json --out repeated',
    ]
    why = (
        "the script without DeepSpeed Workbench does not know "
        f"{' and '.join(beyond)}: this recipe needs the project"
    )
    return Recipe(
        files=files,
        commands="\n".join([*fetched, *_environment(paths), *start]),
        same=(
            "the job with all its options, the rows and "
            "their order, and the kind and number of pods",
        ),
        differs=[why, *differs, "speed and memory are those of your machines"],
    )


def _script(result: ResultRecord, paths: RunPaths) -> Recipe:
    job = get_object(read_json(paths.spec), "job")
    path = as_str(job.get("path"))
    folder = as_str(job.get("folder"))
    name = path.removeprefix(f"{folder}/") if folder else path.rpartition("/")[2]
    module = as_str(job.get("module"))
    program = ["-m", module] if module else [name]
    given = job.get("args")
    args = [str(arg) for arg in given] if isinstance(given, list) else []
    files = {**_script_files(paths, name), **_common(result, paths)}
    differs = []
    if name not in files:
        differs.append(
            f"{name} is not in the run directory: put it, with its folder, beside the other files"
        )
    install = [*_install(result)]
    facts = read_json(paths.requirements)
    wanted = [as_str(line) for line in as_list(facts.get("lines"))]
    if wanted:
        files["script-requirements.txt"] = "".join(f"{line}\n" for line in wanted).encode()
        install.append(".venv/bin/pip install -r script-requirements.txt")
    if facts.get("isolated") is True:
        differs.append(
            "the run's script saw none of the pods' packages; here the "
            "packages of requirements.txt are in the same environment"
        )
    lines = [*install, *_environment(paths), *_start(result, [*program, *args], {})]
    return Recipe(
        files=files,
        commands="\n".join(lines),
        same=(
            "the script with its folder, its arguments, the "
            "number of ranks and the versions of the libraries",
        ),
        differs=[*differs, *_places(result)],
    )


def _script_files(paths: RunPaths, script: str) -> dict[str, bytes]:
    """Return the sent files of a script's folder; of a large folder only the script."""
    try:
        with open_within(paths.script, paths.root) as file, zipfile.ZipFile(file) as archive:
            members = [m for m in archive.infolist() if not m.is_dir() and _is_inside(m.filename)]
            if (
                sum(m.file_size for m in members) > _MOST_SCRIPT
                or os.fstat(file.fileno()).st_size > _MOST_DATA
            ):
                members = [
                    m for m in members if m.filename == script and m.file_size <= _MOST_SCRIPT
                ]
            return {m.filename: archive.read(m) for m in members}
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return {}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


_SAME = (
    "rows, their order, the micro-batches and the global batch of every step",
    "initial weights, loss, optimizer, learning rates, clipping, precision and the DeepSpeed JSON",
    "number of ranks and versions of the libraries",
)
_DIFFERS = (
    "ranks are started by DeepSpeed's launcher (pdsh) or "
    "torchrun; the run's were started by agents over SSH",
    "no FLOPS profile, no answers to evaluation rows and no "
    "memory figures are taken; speed is that of your machines",
    "sums over ranks are added in another order on other "
    "hardware: losses agree to some digits, not to the last",
)


def _program() -> dict[str, bytes]:
    """Return the script and the files imported by the script, all for the same folder."""
    program = Path(HOME, *entries.RECIPE.split(".")).with_suffix(".py")
    files = {"train.py": program.read_bytes()}
    for name in _IMPORTED:
        files[f"{name}.py"] = program.with_name(f"{name}.py").read_bytes()
    return {name: content.replace(_IN_PACKAGE, b"from ") for name, content in files.items()}


def _common(result: ResultRecord, paths: RunPaths) -> dict[str, bytes]:
    pins = ""
    for name in _PINNED:
        if name in result.versions:
            public_version = result.versions[name].partition("+")[0]
            pins += f"{name}=={public_version}\n"
    return {
        "requirements.txt": pins.encode(),
        **_there(paths, paths.hostfile),
    }


def _there(paths: RunPaths, *files: Path) -> dict[str, bytes]:
    """Return the contents of files of the run directory, by name. Skip missing files and links."""
    contents: dict[str, bytes] = {}
    for file in files:
        with suppress(OSError):
            contents[file.name] = read_within(file, paths.root, _MOST_ROWS)
    return contents


def _add_rows(
    files: dict[str, bytes],
    differs: list[str],
    paths: RunPaths,
    resolved: Mapping[str, object],
) -> Sequence[str]:
    """Add few rows to the files, or return the lines for fetching many rows."""
    rows = _there(paths, *(paths.inputs / f"{name}.jsonl" for name in ("train", "eval")))
    sources = [paths.inputs / name for name in rows]
    if not rows:
        hub = json.dumps(resolved.get("hub"))
        differs.append(
            f"the rows came from a hub on the pods ({hub}): write them to "
            'train.jsonl and eval.jsonl, a line {"source": …, "target": …} each, '
            "in the order of the hub"
        )
        return []
    if len(zip_contents(rows)) <= _MOST_DATA:
        files |= rows
        return []
    differs.append(
        f"the rows are too many for this card; they are in {paths.inputs} where the run was started"
    )
    digests = ""
    for name, content in rows.items():
        digests += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
    files["rows.sha256"] = digests.encode()
    copies = [f"cp {shlex.quote(str(source))} ." for source in sources]
    return ["# the rows, which are too many for this card", *copies, "sha256sum -c rows.sha256", ""]


def _add_tokenizer(
    files: dict[str, bytes],
    differs: list[str],
    paths: RunPaths,
    model: str,
    revision: str,
) -> None:
    if model != TINY_T5:
        where = "the model hub"
        if Path(model).is_absolute():
            where = "a folder of that machine: copy it to every host"
        which = f"revision {revision}" if revision else "its newest revision"
        differs.append(f"the model {model} is loaded from {where}; {which} is taken")
        return
    kept = _there(
        paths, *(paths.model / name for name in ("tokenizer.json", "tokenizer_config.json"))
    )
    files |= {f"tokenizer/{name}": content for name, content in kept.items()}
    if not kept:
        differs.append(
            "the tokenizer of tiny-t5 is made by the run, "
            "and the run directory has none: it cannot be repeated so"
        )


def _install(result: ResultRecord) -> Sequence[str]:
    python = result.versions.get("python", "")
    minor = ".".join(python.split(".")[:2])
    cpu = result.versions.get("torch", "").endswith("+cpu")
    index = " --extra-index-url https://download.pytorch.org/whl/cpu" if cpu else ""
    return [
        "# on every host, in a folder of the same "
        f"path{f'; the run had Python {python}' if python else ''}",
        f"python{minor or '3'} -m venv .venv",
        f".venv/bin/pip install -r requirements.txt{index}",
        "",
    ]


def _environment(paths: RunPaths) -> Sequence[str]:
    """Return lines for the variables of the job and of its pods. The user sets the values."""
    spec = read_json(paths.spec)
    given = {
        **get_object(get_object(get_object(spec, "cluster"), "pods"), "env"),
        **get_object(get_object(spec, "job"), "env"),
    }
    names = {
        name: value
        for name, value in hide_values(given).items()
        if name.isidentifier() and name.isascii()
    }
    if not names:
        return []
    lines = [
        "# the variables of the run; DeepSpeed passes on to other hosts what ~/.deepspeed_env holds"
    ]
    lines += [
        f': "${{{name}:?set it first; its value is not kept}}"'
        for name in references(names.values())
    ]
    lines += [f'export {name}="{value}"' for name, value in names.items()]
    return [*lines, ""]


def _start(
    result: ResultRecord, program: Sequence[str], options: Mapping[str, object]
) -> Sequence[str]:
    quoted = shlex.join(program)
    launched = f"--module {shlex.join(program[1:])}" if program[0] == "-m" else quoted
    ranks = max(1, result.world_size)
    if runs_alone(options.get("technique")) or ranks == 1:
        return ["# the one rank", f".venv/bin/python {quoted}"]
    return [
        "# all ranks, from the first host (needs pdsh, and "
        "ssh without a password to every host of the hostfile)",
        f".venv/bin/deepspeed --hostfile hostfile --force_multi --no_local_rank {launched}",
        "",
        "# or all ranks on one machine",
        f".venv/bin/torchrun --nproc-per-node {ranks} {quoted}",
    ]


def _places(result: ResultRecord) -> Sequence[str]:
    if any(host.address.startswith("127.") for host in result.hosts):
        return (
            "the hosts were pods on one machine, and are "
            "gone: put your own into hostfile, or use torchrun",
        )
    return ("put your own hosts into hostfile if those of the run are gone",)
