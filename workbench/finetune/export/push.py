"""Upload a run's model and card with `huggingface_hub`, after a check of the rights."""

from __future__ import annotations

import logging
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.display_protocol import Displayable, as_markdown
from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.redact import mask_secrets
from workbench.base.words import scaled
from workbench.finetune.data.sources.dataset import dataset_from
from workbench.finetune.data.sources.hub import Hub
from workbench.finetune.export.folder import (
    SHARD,
    Export,
    check_export,
    export,
    job_of,
    start_lines,
)
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.model.models import model_kind
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)
_TASKS = {"causal": "text-generation", "encoder-decoder": "text2text-generation"}
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
# Files that `save_pretrained` of a model, of adapters and of a tokenizer writes. The last two lines
# match vocabularies.
_SAVED = re.compile(
    r"(?:adapter_)?model(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?"
    r"|(?:adapter_|generation_|tokenizer_|preprocessor_|processor_)?config\.json"
    r"|(?:tokenizer|special_tokens_map|added_tokens|chat_template|normalizer)\.json"
    r"|chat_template\.jinja|additional_chat_templates/[\w-]{1,80}\.jinja"
    r"|[\w-]{0,40}vocab[\w-]{0,40}\.(?:json|txt)|merges\.txt|dict\.txt|bpe\.codes|(?:tekken|emoji|byte_maps)\.json"
    r"|[\w.-]{1,80}\.(?:model|spm|tiktoken|tokenizer)|word_(?:shape|pronunciation)\.json"
)
_GET_TOKEN = (
    "make a token with the right to write, and give it "
    "as token= or in HF_TOKEN, or run `hf auth login`"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed(Displayable):
    url: str
    repo_id: str
    """Full name of the repository on the hub."""
    commit: str
    files: Mapping[str, int]
    """Bytes per file, by name."""
    dtype: str
    """Number format of the weights."""
    start_lines: Mapping[str, str]
    """Lines that start the model, by program."""

    @property
    def size(self) -> int:
        return sum(self.files.values())

    def __repr__(self) -> str:
        return (
            f"Pushed({self.url}, {len(self.files)} files, {scaled(self.size, 'B')}, {self.dtype})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """Card of a pushed model: metadata for the hub, and the facts of the run card."""

    repo_id: str
    result: ResultRecord
    job: FineTune
    dtype: str
    base: str
    """Base model on the hub. Empty: the base is not on the hub."""
    dataset: str
    """Training dataset on the hub. Empty: the dataset is not from the hub."""
    start_lines: Mapping[str, str]


def push(
    result: ResultRecord,
    repo_id: str,
    *,
    private: bool,
    token: str | None,
    dtype: str | None,
    merged: bool,
) -> Pushed:
    from huggingface_hub import HfApi

    paths = RunPaths(result.path)
    check_export(paths, dtype, merged)
    api = HfApi(token=token, library_name="deepspeed-workbench")
    name = _repository(api, repo_id, private)
    with tempfile.TemporaryDirectory(prefix="workbench-push-") as folder:
        model = Path(folder) / "model"
        made = export(
            paths,
            model,
            dtype=dtype,
            merged=merged,
            max_shard_size=SHARD,
        )
        files = _files(model)
        logger.info(
            "pushing to %s: %s",
            name,
            ", ".join(f"{file} ({size:,} bytes)" for file, size in files.items()),
        )
        card = _write_card(result, name, made, model)
        with _explained(api, name):
            message = f"Upload the model of run {paths.root.name}"
            # Without the pattern, loaders would take weights of an earlier push under other names.
            commit = api.upload_folder(
                repo_id=name,
                folder_path=model,
                commit_message=message,
                delete_patterns=_WEIGHTS,
            )
        return Pushed(
            url=f"{api.endpoint}/{name}",
            repo_id=name,
            commit=commit.oid,
            files={**files, card.name: card.stat().st_size},
            dtype=made.dtype,
            start_lines=start_lines(
                name, made.family, made.base, made.revision, scores=made.scores
            ),
        )


def _files(folder: Path) -> dict[str, int]:
    """Return the bytes per file to upload. Raise RunError for an unexpected file name."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        facts = path.lstat()
        if stat.S_ISDIR(facts.st_mode):
            continue
        if not stat.S_ISREG(facts.st_mode) or not _SAVED.fullmatch(name):
            raise RunError(
                f"the exported model holds {name[:200]!r}, a file that transformers and peft do "
                "not save: nothing was uploaded. Export the model to a folder, look at the file, "
                "and upload the folder yourself if the file is right"
            )
        sizes[name] = facts.st_size
    return sizes


def _repository(api: HfApi, repo_id: str, private: bool) -> str:
    """Return the full name of a writable repository, and create the repository if missing."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(
            f"{repo_id!r} is not a name of the hub, as in 'me/model': {error}"
        ) from error
    with _explained(api, repo_id):
        _check_token(api.whoami(), repo_id)
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.model_info(name).private:
            raise RunError(
                f"{api.endpoint}/{name} is public; push with private=False, or under another name"
            )
        api.auth_check(name, write=True)
    return name


def _check_token(who: Mapping[str, object], repo_id: str) -> None:
    match who:
        case {"auth": {"accessToken": {"role": "read"}}}:
            raise RunError(f"the token of {who.get('name')} may only read: {_GET_TOKEN}")
    organisations = who.get("orgs")
    owners = [who.get("name")]
    if isinstance(organisations, list):
        owners += [each.get("name") for each in organisations]
    owner, slash, _ = repo_id.rpartition("/")
    if slash and owner not in owners:
        raise RunError(
            f"{who.get('name')} may not write to {owner!r}; allowed owners: "
            f"{', '.join(map(str, owners))}"
        )


@contextmanager
def _explained(api: HfApi, repo_id: str) -> Iterator[None]:
    """Turn the hub's errors into errors that explain the cause."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise RunError(f"no token for {api.endpoint}: {_GET_TOKEN}") from error
    except HfHubHTTPError as error:
        words = {
            401: f"the token is not valid at {api.endpoint}: {_GET_TOKEN}",
            403: f"the token lacks the right to write to {repo_id}: {_GET_TOKEN}",
        }.get(error.response.status_code, f"{api.endpoint} refused {repo_id}")
        raise RunError(mask_secrets(f"{words}\n{error}")) from error
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        why = " ".join(dict.fromkeys(str(each) for each in (error, error.__cause__) if each))
        raise RunError(
            mask_secrets(f"{repo_id} cannot be uploaded to {api.endpoint}: {why}")
        ) from error


def _write_card(result: ResultRecord, repo_id: str, export: Export, folder: Path) -> Path:
    from huggingface_hub import ModelCardData

    job = job_of(RunPaths(result.path))
    base = _hub_id(job.model)
    dataset = _hub_dataset(job)
    adapters = [] if job.peft == "none" else [job.peft]
    metadata = ModelCardData(
        base_model=base or None,
        library_name="peft" if export.base else "transformers",
        datasets=[dataset] if dataset else None,
        pipeline_tag=_TASKS[export.family],
        tags=["deepspeed-workbench", job.technique, *adapters],
    )
    card = ModelCard(
        repo_id=repo_id,
        result=result,
        job=job,
        dtype=export.dtype,
        base=base,
        dataset=dataset,
        start_lines=start_lines(
            repo_id, export.family, export.base, export.revision, scores=export.scores
        ),
    )
    path = folder / "README.md"
    path.write_text(f"---\n{metadata.to_yaml()}\n---\n\n{as_markdown(card)}", encoding="utf-8")
    return path


def _hub_id(name: str) -> str:
    with suppress(WorkbenchError):
        return name if model_kind(name) == "hub" else ""
    return ""


def _hub_dataset(job: FineTune) -> str:
    with suppress(WorkbenchError):
        match dataset_from(job.dataset):
            case Hub(name=name):
                return _hub_id(name)  # the name may be a folder
    return ""
