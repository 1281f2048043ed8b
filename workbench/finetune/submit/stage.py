"""Send the rows and the model of a fine-tuning run to a pod."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from workbench.base.files import read_bytes
from workbench.base.package import file_digest
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.model.models import model_kind
from workbench.finetune.submit.travels import model_files
from workbench.jobs.job import PodFetch, PodStore
from workbench.jobs.script_folder import files_of
from workbench.rundir.paths import RunPaths


def files_for(job: FineTune, link: PodStore, root: Path, gpus: int) -> Mapping[str, str]:
    """Send data and model to a pod; return the job file of the pod."""
    paths = RunPaths(root)
    resolved = json.loads(read_bytes(paths.job))
    for name in ("train", "eval"):
        local = resolved.get(name)
        if local:
            resolved[name] = _sent_rows(link, paths.inputs / local)
    model = Path(job.model)
    if model.is_dir():
        resolved["base"] = job.model
        resolved["job"]["model"] = sent_model(link, model)
    adapters = job.lora.get("resume_from")
    if adapters:
        resolved["job"]["lora"]["resume_from"] = sent_model(link, Path(str(adapters)))
    resolved["gpus"] = gpus
    # Beside the store for all runs of the cluster, or in the shared folder for all clusters.
    resolved["token_files"] = str(Path(job.checkpoint_folder or link.store.parent) / "tokens")
    return {paths.job.name: json.dumps(resolved)}


def fetch_for_pods(job: FineTune) -> PodFetch | None:
    """Return the fetch of a hub model. None: the model is not of the hub."""
    if model_kind(job.model) != "hub":
        return None
    script = Path(__file__).with_name("hub_files.py").read_text(encoding="utf-8")
    revision = job.model_revision or "main"
    request = {"model": job.model, "reference": revision}
    return PodFetch(name=job.model, revision=revision, script=script, request=request)


def _sent_rows(link: PodStore, path: Path) -> str:
    """Return the path of a file of rows on a pod; send the file if the pod cannot see it."""
    if link.sees(path):
        return str(path)
    return link.put_once(path, _digest_of(path))


def sent_model(link: PodStore, folder: Path) -> str:
    """Return the path of a model's folder on a pod; send what is read if the pod cannot see it."""
    if link.sees(folder):
        return str(folder)
    # A run directory may have a link to a model in a shared folder.
    real = folder.resolve()
    return str(real) if link.sees(real) else _sent(link, folder, model_files(folder))


def sent_folder(link: PodStore, folder: Path) -> str:
    """Return the path of any other folder on a pod; send all files if the pod cannot see them."""
    if link.sees(folder):
        return str(folder)
    return _sent(link, folder, [path.relative_to(folder).as_posix() for path in files_of(folder)])


def _sent(link: PodStore, folder: Path, names: Sequence[str]) -> str:
    digests = {name: _digest_of(folder / name) for name in names}
    listing = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    target = link.store / f"model-{listing[:32]}.{link.name}"
    for name, digest in digests.items():
        place = target / name
        stored = link.put_once(folder / name, digest)
        link.run(["mkdir", "-p", "-m", "700", "--", str(place.parent)])
        # A symbolic link: another pod with the same store may be replacing the content at the same
        # time.
        link.run(["ln", "-sf", "--", stored, str(place)])
    return str(target)


def _digest_of(path: Path) -> str:
    seen = path.stat()
    return _digest(path, seen.st_size, seen.st_mtime_ns)


@lru_cache(maxsize=1024)
def _digest(path: Path, _size: int, _mtime_ns: int) -> str:
    return file_digest(path)  # read once for all pods
