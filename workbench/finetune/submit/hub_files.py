"""Fetch a model into the cache of `huggingface_hub`, or complete the cache from files of a pod.

The text of this file runs on pods: `python -P -c`, with a request on standard input.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_SAFE = ("model*.safetensors", "adapter_model*.safetensors")
_OLD = ("pytorch_model*.bin", "adapter_model*.bin")
# Files of a configuration, a tokenizer and templates.
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_TOLD_S = 1.0
_SHA256_DIGITS = 64


def main() -> None:
    """Answer a request: `fetch` from the hub, or `place` the files of a list."""
    request = json.loads(sys.stdin.readline())
    # Before the import, which reads the variables.
    os.environ.update({**request["env"], "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    progress: dict[str, Any] = {"size": 0}
    end = threading.Event()
    teller = threading.Thread(target=_tell, args=(progress, end), daemon=True)
    teller.start()
    try:
        answer = fetch(request, progress) if request["verb"] == "fetch" else place(request)
    except Exception as error:  # process boundary: the keeper names the error
        answer = {"error": f"{type(error).__name__}: {error}"}
    end.set()
    teller.join()
    _say(answer)


def fetch(request: Mapping[str, Any], progress: dict[str, Any]) -> Mapping[str, object]:
    """Fetch what transformers reads. Return the commit, and each file with its SHA-256."""
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    model, revision = request["model"], request["revision"]
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
    except (GatedRepoError, RepositoryNotFoundError):
        raise
    except Exception:  # as transformers does: without the hub, the cache is used
        config = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(config, str):
            raise
        found = os.path.dirname(config)  # noqa: PTH120
    else:
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        names = _wanted(list(sizes))
        root = _root(constants.HF_HUB_CACHE, model)
        progress |= {"blobs": root / "blobs", "size": sum(sizes[name] for name in names)}
        found = snapshot_download(model, revision=info.sha, allow_patterns=names)
        _refer(root, request["reference"], str(info.sha))
    folder = Path(found)
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _wanted([name, "model.safetensors"])[:1] == [name]:
            files.append(_facts(path, name))
    return {"commit": folder.name, "folder": str(folder), "files": files}


def place(request: Mapping[str, Any]) -> Mapping[str, object]:
    """Link the blobs of a list into a snapshot. Return where the missing blobs belong."""
    from huggingface_hub import constants

    root = _root(constants.HF_HUB_CACHE, request["model"])
    folder = root / "snapshots" / request["commit"]
    missing = {}
    for file in request["files"]:
        link, blob = folder / file["name"], root / "blobs" / file["blob"]
        if link.is_file() and link.stat().st_size == file["size"]:
            continue
        if not blob.is_file() or blob.stat().st_size != file["size"]:
            missing[file["name"]] = str(blob)
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if not missing:
        _refer(root, request["reference"], request["commit"])
    return {"folder": str(folder), "missing": missing}


def _wanted(names: Sequence[str]) -> list[str]:
    """Return the files that transformers reads, in the given order."""
    top = [name for name in names if "/" not in name]
    has_safe = any(fnmatch(name, _SAFE[0]) or fnmatch(name, _SAFE[1]) for name in top)
    patterns = (*_SMALL, *_SAFE, *(() if has_safe else _OLD))
    return [
        name
        for name in names
        if name.startswith("additional_chat_templates/")
        or ("/" not in name and any(fnmatch(name, pattern) for pattern in patterns))
    ]


def _facts(path: Path, name: str) -> dict[str, object]:
    real = path.resolve()
    # The blob of a large file has its SHA-256 as its name.
    digest = real.name
    if len(digest) != _SHA256_DIGITS:
        with real.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    blob = real.name if real.parent.name == "blobs" else digest
    size = real.stat().st_size
    return {"name": name, "blob": blob, "sha256": digest, "size": size, "path": str(real)}


def _root(cache: str, model: str) -> Path:
    return Path(cache).absolute() / f"models--{model.replace('/', '--')}"


def _refer(root: Path, revision: str, commit: str) -> None:
    """Let a branch or tag lead to the commit, as `huggingface_hub` does."""
    if revision != commit:
        reference = root / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit, encoding="ascii")


def _tell(progress: Mapping[str, Any], end: threading.Event) -> None:
    """Show each second that the program works. End it when the keeper has gone."""
    while not end.wait(_TOLD_S):
        size = progress["size"]
        blobs = progress["blobs"].glob("*") if size else ()
        done = sum(path.stat().st_size for path in blobs if path.exists())
        try:
            _say({"done": min(done, size), "size": size})
        except OSError:
            os._exit(1)


def _say(facts: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
