"""Export a run's model to a folder: checked here, written by the process of `predict`."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from workbench.base.display_protocol import Displayable
from workbench.base.errors import ConfigError, RunError, one_of
from workbench.base.files import load_json, user_path
from workbench.base.files.folders import remove_folder
from workbench.base.json_values import get_object
from workbench.base.words import scaled
from workbench.finetune.answers.server import check_model, server_of
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.model.models import Family, model_kind
from workbench.jobs.registry import job_from_dict
from workbench.rundir.checkpoints import model_folder
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.address import check_address, is_address
from workbench.rundir.stores.folder import prepare_folder, put_folder
from workbench.rundir.stores.store import Store

SHARD = "5GB"
"""Maximum size of a file of weights, as the model hub recommends."""
_CONFIGS = ("config.json", "adapter_config.json")  # make a folder a model
Dtype = Literal["fp32", "bf16", "fp16"]
_AUTO = {"causal": "AutoModelForCausalLM", "encoder-decoder": "AutoModelForSeq2SeqLM"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(Displayable):
    """A folder with a run's model, and the lines that start the model elsewhere."""

    folder: Path | str
    """Absolute path of the folder, or its address in an object store."""
    files: Mapping[str, int]
    """Bytes per file, by name."""
    dtype: str
    """Number format of the weights: fp32, bf16 or fp16."""
    family: Family
    base: str = ""
    """Base model of the adapters. Empty: the folder holds a whole model."""
    revision: str | None = None
    """Revision of the base on the hub. None: the newest."""
    gguf: str = ""
    """Name of the GGUF file. Empty: the folder holds a model for transformers."""
    chats: bool = False
    """Whether the model answers turns in its chat template."""
    scores: bool = False
    """Whether the model scores texts, instead of answering."""

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def start_lines(self) -> Mapping[str, str]:
        """Lines that start the model, by program. vLLM has no line for encoder-decoder models.

        A model in an object store is copied first.
        """
        name = str(self.folder)
        lines: dict[str, str] = {}
        if is_address(name):
            address = name
            name = address.rpartition("/")[2]
            get = f"fs.get(path, {name!r}, recursive=True)"
            lines["fsspec"] = f"import fsspec; fs, path = fsspec.url_to_fs({address!r}); {get}"
        if self.gguf:
            return {**lines, **gguf_lines(Path(name) / self.gguf, chats=self.chats)}
        return {
            **lines,
            **start_lines(name, self.family, self.base, self.revision, scores=self.scores),
        }

    def __repr__(self) -> str:
        return (
            f"Export({self.folder}, {len(self.files)} "
            f"files, {scaled(self.size, 'B')}, {self.dtype})"
        )


def start_lines(
    model: str, family: Family, base: str = "", revision: str | None = None, *, scores: bool = False
) -> Mapping[str, str]:
    """Return the lines that start a model, by program. `revision` is that of the base.

    Example:
        >>> start_lines("me/model", "causal")["vLLM"]
        'vllm serve me/model'
    """
    auto = "AutoModelForSequenceClassification" if scores else _AUTO[family]
    at = shlex.quote(model)
    base_at = shlex.quote(base)
    if base and revision:
        base_at += f" --revision {shlex.quote(revision)}"
    model_line = f"{auto}.from_pretrained({model!r})"
    tokenizer_line = f"AutoTokenizer.from_pretrained({model!r})"
    lines = {"transformers": f"{model_line}, {tokenizer_line}"}
    if scores:
        return lines
    if family == "causal":
        lora = f"vllm serve {base_at} --enable-lora --lora-modules adapters={at}"
        lines["vLLM"] = lora if base else f"vllm serve {at}"
    tgi = f"--model-id {base_at} --lora-adapters adapters={at}" if base else f"--model-id {at}"
    return {**lines, "TGI": f"text-generation-launcher {tgi}"}


def gguf_lines(file: Path, *, chats: bool) -> Mapping[str, str]:
    """Return the lines that start a GGUF, by program. The file has a Modelfile beside it.

    Example:
        >>> gguf_lines(Path("/my/Model 1/model-q8_0.gguf"), chats=True)["Ollama"]
        "ollama create model-1 -f '/my/Model 1/Modelfile' && ollama run model-1"
    """
    at = shlex.quote(str(file))
    name = re.sub(r"[^a-z0-9._-]+", "-", file.parent.name.lower()).strip("-._") or "model"
    modelfile = shlex.quote(str(file.with_name("Modelfile")))
    # Without a chat the whole prompt is given, as `run.predict` writes it.
    form = "--jinja" if chats else "-no-cnv -p PROMPT"
    return {
        "llama.cpp": f"llama-cli -m {at} --temp 0 {form}",
        "llama.cpp server": f"llama-server -m {at}{' --jinja' if chats else ''}",
        "Ollama": f"ollama create {name} -f {modelfile} && ollama run {name}",
    }


def check_export(paths: RunPaths, dtype: str | None, merged: bool) -> None:
    """Raise an error for an impossible export, before a model is loaded."""
    if dtype not in (None, *get_args(Dtype)):
        raise one_of("dtype", dtype, get_args(Dtype))
    check_model(paths)
    if not merged and has_adapters(paths):
        job = job_of(paths)
        base = job.model
        if job.lora.get("modules_to_save"):
            raise ConfigError(
                "vLLM and TGI do not load adapters with modules_to_save; export with "
                f"merged=True (peft loads the adapters in {model_folder(paths)})"
            )
        if model_kind(base) == "builtin":
            raise ConfigError(
                f"adapters of the built-in {base!r} fit no model elsewhere; export with merged=True"
            )


def export(
    paths: RunPaths,
    folder: str | Path,
    *,
    dtype: str | None,
    merged: bool,
    max_shard_size: int | str,
) -> Export:
    """Write a run's model into a folder or an object store; see `Run.export`."""
    check_export(paths, dtype, merged)
    if is_address(folder):

        def write(target: Path) -> Export:
            return export(paths, target, dtype=dtype, merged=merged, max_shard_size=max_shard_size)

        return export_to_store(str(folder), write)
    target = new_folder(folder)
    facts = server_of(paths).export(
        target,
        dtype=dtype,
        merged=merged,
        max_shard_size=max_shard_size,
    )
    open_to_readers(target)
    return Export(
        folder=target,
        files=sizes_in(target),
        dtype=str(facts["dtype"]),
        family="causal" if facts["family"] == "causal" else "encoder-decoder",
        base="" if merged or not has_adapters(paths) else job_of(paths).model,
        revision=job_of(paths).model_revision,
        scores=method_of(job_of(paths).method).scores,
    )


def new_folder(folder: str | Path) -> Path:
    """Return the absolute path of a folder to make, and make the folders above."""
    target = user_path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; name a new folder for the model")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {target.parent}: {error.strerror}") from error
    return target


def open_to_readers(folder: Path) -> None:
    """Give a folder and its files the rights of new ones. Some libraries write for the owner alone.

    The umask of the process decides the rights.
    """
    new = folder / ".new"
    new.mkdir()
    mode = new.stat().st_mode
    new.rmdir()
    folder.chmod(mode)
    for path in folder.iterdir():
        path.chmod(mode & 0o666)


def sizes_in(folder: Path) -> Mapping[str, int]:
    """Return the bytes of each file in a folder, by name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def export_to_store(address: str, write: Callable[[Path], Export]) -> Export:
    """Write a model into a temporary folder with `write`, and upload the folder.

    A failed upload leaves the temporary folder, and the error names it.
    """
    address = check_address(address, "folder")
    with Store(address) as store:
        unfinished = prepare_folder(store)
        store.close()  # loading the model takes memory and minutes
        scratch = Path(tempfile.mkdtemp(prefix="workbench-export-"))
        try:
            made = write(scratch / "model")
        except BaseException:
            remove_folder(scratch)
            raise
        try:
            put_folder(store, scratch / "model", last=_CONFIGS, unfinished=unfinished)
        except BaseException as error:
            whole = (
                f"the exported model is whole in {made.folder}; call export({address!r}) again, "
                "or upload the folder yourself and remove it"
            )
            if isinstance(error, RunError):
                raise RunError(f"{error}; {whole}") from error
            error.add_note(whole)
            raise
        remove_folder(scratch)
    return replace(made, folder=address)


def merge(paths: RunPaths, path: str | Path) -> Path:
    """Merge a run's adapters into the base, and write a folder for plain `from_pretrained`."""
    if is_address(path):
        raise ConfigError(
            f"merge writes a folder of this machine; call export({path!r}, dtype=None) to merge "
            "the adapters and upload the model"
        )
    model = model_folder(paths)
    if (model / "config.json").is_file():
        raise RunError(
            f"the run in {paths.root} trained no adapters: {model} is already a whole model"
        )
    merged = export(
        paths,
        path,
        dtype=None,
        merged=True,
        max_shard_size=SHARD,
    )
    return Path(merged.folder)


def job_of(paths: RunPaths) -> FineTune:
    job = job_from_dict(get_object(load_json(paths.job), "job"))
    assert isinstance(job, FineTune)  # a script leaves no model here
    return job


def has_adapters(paths: RunPaths) -> bool:
    """Whether a run left adapters, and no whole model."""
    return (model_folder(paths) / "adapter_config.json").is_file()
