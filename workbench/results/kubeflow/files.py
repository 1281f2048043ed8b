"""What of a run travels in a ConfigMap; no value of a variable is among it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from workbench.base.child import HOME
from workbench.base.errors import ConfigError
from workbench.base.files import read_bytes, read_json
from workbench.base.json_values import part, parts
from workbench.base.package import zip_contents, zip_files
from workbench.finetune.evaluation import carried_metrics
from workbench.jobs.choices import Optimizer
from workbench.jobs.deepspeed.files import load
from workbench.jobs.evaluation import metric_text
from workbench.jobs.finetune import FineTune
from workbench.jobs.job import Job
from workbench.jobs.script import Script, references
from workbench.jobs.script_folder import zip_script
from workbench.pods.pod_spec import PodSpec
from workbench.results.kubeflow.objects import RESULTS
from workbench.results.kubeflow.options import HandoverOptions
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import stored

_MOST_BYTES = (1 << 20) - 4096  # Kubernetes takes a ConfigMap of 1 MiB; some of it are names
_MOST_CARRIED = 512 << 20  # bytes of rows or a script that are looked at
_LEFT_OUT = ("lab", "display", "results", "benchmark", "client", "keeper", "cli.py", "__main__.py")


def config_files(
    paths: RunPaths, job: Job, options: HandoverOptions, pod: PodSpec, nodes: int
) -> Mapping[str, bytes]:
    """Return the files of the ConfigMap: the package, the specification and, packed, what it names."""
    inputs: dict[str, bytes] = {}
    match job:
        case Script():
            asked = _script(paths, job, options, inputs)
        case FineTune():
            asked = _finetune(paths, job, options, inputs)
        case _:
            raise ConfigError(f"a job of kind {job.kind!r} cannot be handed over yet; submit it")
    env = {**pod.env, **job.env}
    _check_secrets(env, options)
    pods = {**pod.to_dict(), "image": None}
    spec = stored({"cluster": {"pods": pods, "count": nodes}, "job": {**asked, "launcher": "ssh"}})
    files = {"spec.json": json.dumps(spec, indent=1).encode(), "workbench.zip": _package()}
    if inputs:
        files["inputs.zip"] = inputs["script"] if "script" in inputs else zip_contents(inputs)
    size = sum(map(len, files.values()))
    if size > _MOST_BYTES:
        what, put = "the rows", f"train.jsonl and eval.jsonl of {paths.inputs}"
        if job.kind == Script.kind:
            what, put = "the script's folder", "its folder as 'script'"
        raise ConfigError(
            f"{what} would make a ConfigMap of {size / 2**20:.1f} MiB, and Kubernetes takes 1 MiB: put {put} into a "
            "folder of the claim and name claim and folder: run.manifest(…, pvc='claim', inputs='folder')"
        )
    return files


@cache
def _package() -> bytes:
    """Zip the rooms of this package that ranks need: a ConfigMap is small."""
    root = Path(HOME, "workbench")
    rooms = [
        path
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[0] not in _LEFT_OUT
    ]
    return zip_files(root.parent, rooms)


def _finetune(
    paths: RunPaths, job: FineTune, options: HandoverOptions, inputs: dict[str, bytes]
) -> Mapping[str, object]:
    shipped = read_json(paths.job, within=paths.root)
    asked: dict[str, object] = job.to_dict()
    if job.lora.get("resume_from"):
        raise ConfigError(
            "a job that goes on with adapters cannot be handed over: merge them first (run.merge)"
        )
    if Path(job.model).is_absolute():
        if not options.inputs:
            raise ConfigError(
                f"the model is {job.model}, a folder of this machine: copy it to the claim, into a folder 'model', and "
                "name claim and folder: run.manifest(…, pvc='claim', inputs='folder')"
            )
        asked["model"] = f"{RESULTS}/{options.inputs}/model"
    folder = f"{RESULTS}/{options.inputs}/" if options.inputs else ""
    kind = job.dataset.get("kind") if isinstance(job.dataset, Mapping) else job.dataset
    if shipped.get("train") and kind != "wikisql-mini":
        of_rows = (
            "train",
            "eval",
            *(["tables"] if part(shipped, "metric_inputs").get("tables") else []),
        )
        names = [f"{name}.jsonl" for name in of_rows if name == "tables" or shipped.get(name)]
        if not options.inputs:
            inputs.update({name: _content(paths, paths.inputs / name) for name in names})
        asked["dataset"] = {
            "kind": "files",
            **{name.partition(".")[0]: f"{folder}{name}" for name in names},
        }
    sent = parts(part(shipped, "metric_inputs").get("metrics"))
    asked["metrics"], metrics = carried_metrics(
        [metric_text(metric) for metric in job.metrics], sent, folder
    )
    if not options.inputs:
        inputs.update(metrics)
    if shipped.get("deepspeed") is not None:
        asked["deepspeed"] = shipped["deepspeed"] if job.deepspeed is not None else _shipped(job)
    return asked


def _content(paths: RunPaths, file: Path) -> bytes:
    try:
        return read_bytes(file, within=paths.root, limit=_MOST_CARRIED)
    except OSError as error:
        raise ConfigError(f"{file} cannot be carried: {error.strerror}") from error


def _shipped(job: FineTune) -> Mapping[str, object]:
    """Return the technique's own configuration: `dsconfig/` does not travel with the package."""
    config, _ = load(job)
    if job.optimizer != Optimizer.ADAMW:
        config.pop("optimizer", None)
    return config


def _script(
    paths: RunPaths, job: Script, options: HandoverOptions, inputs: dict[str, bytes]
) -> Mapping[str, object]:
    name = Path(options.script or job.path).name
    if options.inputs:
        return {**job.to_dict(), "path": f"{RESULTS}/{options.inputs}/script/{name}"}
    if options.script:
        inputs["script"] = zip_script(Path(options.script).expanduser().absolute())
    elif paths.script.is_file():
        inputs["script"] = _content(paths, paths.script)
    else:
        raise ConfigError(
            f"{paths.root} does not hold the script that it ran (a version before this one made it): name it anew, "
            f"run.manifest(…, script='FOLDER/{name}')"
        )
    return {**job.to_dict(), "path": name}


def _check_secrets(env: Mapping[str, str], options: HandoverOptions) -> None:
    given = {*options.sources, *options.env}
    missing = [variable for variable in references(env.values()) if variable not in given]
    if missing:
        others = ", ".join(
            f'"{variable}": "secret/key"' for variable in missing if variable != "HF_TOKEN"
        )
        hints = ["token_secret='hub'"] * ("HF_TOKEN" in missing) + [f"secrets={{{others}}}"] * bool(
            others
        )
        raise ConfigError(
            f"the run takes {', '.join(missing)} from the environment, and no value is in a manifest: name the Secrets "
            f"that hold them, run.manifest(…, {', '.join(hints)}), or give what is no secret with env="
        )
