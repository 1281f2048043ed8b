"""Zip a script's folder for the pods.

`.workbenchignore` overrides `.gitignore` and the defaults.
"""

from __future__ import annotations

import io
import os
import tokenize
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import is_there
from workbench.base.package import file_digest, zip_files
from workbench.base.redact import Redactor
from workbench.base.words import pluralize, size
from workbench.jobs.ignore_patterns import IgnorePatterns

IGNORE_FILE = ".workbenchignore"
_GIT_FILE = ".gitignore"
_MOST_BYTES = 128 << 10  # of an ignore file
SECRETS = (
    *(
        ".env",
        ".env.*",
        ".envrc",
        ".netrc",
        ".npmrc",
        ".pypirc",
        ".pgpass",
        ".my.cnf",
        ".git-credentials",
    ),
    *(
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*.ppk",
        "kubeconfig",
    ),
    *(
        "*.kubeconfig",
        "credentials",
        "credentials.json",
        "secrets.json",
        "secrets.y*ml",
        "service-account*.json",
    ),
    *(
        "service_account*.json",
        "application_default_credentials.json",
        "token",
        "*.tfstate",
        "*.tfstate.*",
    ),
    *(
        ".aws/",
        ".azure/",
        ".config/",
        ".ssh/",
        ".gnupg/",
        ".kube/",
        ".docker/",
        ".huggingface/",
        ".cache/",
    ),
    *(".terraform/", "wandb/", "mlruns/", ".*_history"),
)
"""Patterns of files that hold keys, tokens or histories."""
DEFAULTS = (
    *(
        ".git",
        "__pycache__/",
        "*.pyc",
        ".venv/",
        "venv/",
        "node_modules/",
        "*.ipynb_checkpoints",
        "runs/",
    ),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".tox/", *SECRETS),
)
"""Patterns of files to leave out by default.

Lines of the ignore file come later and can include files again (`!runs/`, `!.env`).
"""
_LARGEST = 200 << 20  # bytes of a script's folder; more is data, or the wrong folder
_NAMED = 5
_IGNORED = "it is left out"
_LINK = "it leads to something that does not travel"

_Rules = Sequence[tuple[Path, IgnorePatterns]]
"""Ignore files with their folders; the last match decides."""


def check_args(args: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse arguments with a secret: other users of a pod's machine can read arguments."""
    redact = Redactor(environment)
    for place, arg in enumerate(args):
        before = f"{args[place - 1]}=" if place and args[place - 1].startswith("-") else ""
        if redact(before + arg) != before + arg:
            raise ConfigError(
                f"args[{place}] looks like a secret, and `ps` on a pod shows arguments to "
                "every user there. Give the value as env={'NAME': …} and read os.environ "
                "in the script. Or write ${NAME} into args: the rank fills in the value"
            )


def check_outputs(patterns: Sequence[str]) -> None:
    """Refuse an invalid pattern before the script starts."""
    for pattern in patterns:
        try:
            IgnorePatterns([pattern])
        except ValueError as error:
            raise ConfigError(
                f"outputs has {pattern!r}, not a pattern of "
                f"a .gitignore: {error}; correct the pattern"
            ) from error


_SHOWN = 300  # letters of a path


_SHELL = (".sh", ".bash", ".zsh")
# A line such as `lr: 3` is Python too, so a file of settings may run without an error.
_SETTINGS = (".yaml", ".yml", ".json", ".jsonl", ".toml", ".ini", ".cfg", ".csv")


def _check_python(script: Path, shown: str) -> None:
    """Refuse a file that Python cannot read as a program."""
    notebook = ConfigError(
        f"{shown} is a notebook. Write a script with `jupyter nbconvert --to script"
        f" {script.name}`, remove the lines with get_ipython, and give the script"
    )
    if script.suffix == ".ipynb":
        raise notebook
    if script.suffix in _SHELL:
        raise ConfigError(
            f"{shown} is a shell script. Give the Python file that the shell script starts, with"
            " args and env"
        )
    if script.suffix in _SETTINGS:
        raise ConfigError(
            f"{shown} is no Python file. Give the Python file that reads the settings, with"
            f" args=[{script.name!r}]"
        )
    try:
        with tokenize.open(script) as file:
            content = file.read()
    except (SyntaxError, UnicodeDecodeError):
        content = "\0"
    if "\0" in content:
        raise ConfigError(f"{shown} is no text that Python reads. Save the file as UTF-8")
    if content.startswith("{") and '"nbformat"' in content:
        raise notebook


def check_script(script: Path, root: Path | None = None) -> list[Path]:
    """Check a script and its folder before the run starts, and return the files to send.

    `root`: the folder, if not beside.
    """
    shown = f"the script {str(script)[:_SHOWN]}"
    if not is_there(script) or not script.exists():
        raise ConfigError(f"{shown} does not exist")
    if not script.is_file():
        raise ConfigError(
            f"{shown} is not a file. Give the Python file, or a module: Script(module='pkg.train',"
            " folder='.')"
        )
    _check_python(script, shown)
    folder = root or script.parent
    if not script.is_relative_to(folder):
        raise ConfigError(
            f"the script {str(script)[:_SHOWN]} is not in the folder {str(folder)[:_SHOWN]}. "
            "Give a folder above the script"
        )
    name = script.relative_to(folder).as_posix()
    if _spec(folder / IGNORE_FILE).decide(name):
        raise ConfigError(
            f"{folder / IGNORE_FILE} leaves out {name}, the script itself; add a line !{name}"
        )
    # The user named the script, so the script is sent even if it is ignored or a link.
    files = sorted({*script_files(folder), script})
    for path in files:
        _check_name(str(path.relative_to(folder)), folder)
    # The folder is sent at every submit, so large files do not belong there.
    sizes = {path: path.stat().st_size for path in files}
    if (whole := sum(sizes.values())) > _LARGEST:
        largest = sorted(files, key=lambda path: -sizes[path])[:_NAMED]
        named = ", ".join(
            f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest
        )
        raise ConfigError(
            f"the script's folder {folder} holds {whole / 2**20:.0f} MiB; at most "
            f"{_LARGEST >> 20} MiB travel to the pods. The largest: {named}. Name "
            f"files that the script does not need in {folder / IGNORE_FILE}, a "
            "pattern per line as in a .gitignore. Or move the script into a "
            "separate folder, and give data by path or hub id"
        )
    return files


def _check_name(name: str, folder: Path) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the file {name!a} in the script's folder {folder} cannot travel: the name "
            f"is not UTF-8. Rename the file, or name the file in {folder / IGNORE_FILE}"
        ) from None


def script_files(folder: Path) -> list[Path]:
    """Return the files of a script's folder to send, sorted."""
    return sorted(folder / name for name, stays in _script_walk(folder) if not stays)


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every sent file of a script's folder, by file name."""
    return {file.relative_to(folder).as_posix(): file_digest(file) for file in script_files(folder)}


def left_out(folder: Path) -> list[str]:
    """Return files left out for a secret-like name, and links out of the folder."""
    return sorted(
        name
        for name, stays in _script_walk(folder)
        if stays and (stays == _LINK or _patterns(SECRETS).decide(name))
    )


def files_of(folder: Path) -> list[Path]:
    """Return the files of any other folder to send, sorted.

    Only the default patterns apply, no ignore file.
    """
    return sorted(
        folder / name
        for name, stays in _walk(folder, [(folder, _patterns(DEFAULTS))], nested=False)
        if not stays
    )


def zip_script(script: Path, root: Path | None = None) -> bytes:
    """Zip the folder of a script. The same files produce the same bytes."""
    folder = root or script.parent
    try:
        return zip_files(folder, check_script(script, folder))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.filename} vanished from the script's folder while the folder was read. Submit "
            f"again, or name the file in {folder / IGNORE_FILE}"
        ) from error


def travelling(archive: bytes) -> str:
    """Return number and size of the files in the archive, in words."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        sizes = [member.file_size for member in packed.infolist()]
    return f"the script's folder ({pluralize(len(sizes), 'file')}, {size(sum(sizes))})"


def _rules(folder: Path) -> _Rules:
    root = next((up for up in (folder, *folder.parents) if (up / ".git").exists()), folder)
    above = [up for up in reversed(folder.parents) if up.is_relative_to(root)]
    outer = [(up, _spec(up / _GIT_FILE)) for up in above]
    if _ignored(outer, folder, True):
        outer = []  # the user named the folder, so the repository's rules do not apply
    return [
        *outer,
        (folder, _spec(folder / _GIT_FILE)),
        (folder, _patterns(DEFAULTS)),
        (folder, _spec(folder / IGNORE_FILE)),
    ]


def _ignored(rules: _Rules, path: Path, is_folder: bool) -> bool:
    verdict = False
    for base, spec in rules:
        if path.is_relative_to(base):
            name = path.relative_to(base).as_posix() + ("/" if is_folder else "")
            decided = spec.decide(name)
            verdict = verdict if decided is None else decided
    return verdict


def _script_walk(folder: Path) -> Iterator[tuple[str, str]]:
    rules = _rules(folder)
    inside = folder.resolve()
    for name, stays in _walk(folder, rules, nested=True):
        if not stays and (folder / name).is_symlink():
            real = (folder / name).resolve()
            leads_out = not real.is_relative_to(inside) or _ignored(
                rules, folder / real.relative_to(inside), False
            )
            stays = _LINK if leads_out else ""
        yield name, stays


def _walk(folder: Path, rules: _Rules, *, nested: bool) -> Iterator[tuple[str, str]]:
    """Yield every file and ignored folder with a reason to leave the entry out.

    `nested` also reads ignore files below.
    """
    # Skip everything below an ignored folder, as git does: no line can include such a file again.
    rules = list(rules)
    for place, folders, names in os.walk(folder):
        here = Path(place)
        if nested and here != folder and _GIT_FILE in names:
            rules.insert(-2, (here, _spec(here / _GIT_FILE)))
        # A cluster's directory has keys and short-lived files.
        clusters = {
            name
            for name in folders
            if (here / name / "cluster.json").is_file() and (here / name / "keeper.log").is_file()
        }
        pruned = clusters | {name for name in folders if _ignored(rules, here / name, True)}
        yield from (
            (f"{(here / name).relative_to(folder).as_posix()}/", _IGNORED) for name in pruned
        )
        folders[:] = [name for name in folders if name not in pruned]
        for name in names:
            if (here / name).is_file():
                stays = _IGNORED if _ignored(rules, here / name, False) else ""
                yield (here / name).relative_to(folder).as_posix(), stays


@cache
def _patterns(lines: tuple[str, ...]) -> IgnorePatterns:
    return IgnorePatterns(lines)


def _spec(path: Path) -> IgnorePatterns:
    """Read an ignore file; skip invalid lines of a `.gitignore`, as git does."""
    of_git = path.name == _GIT_FILE
    lines: list[str] = []
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(
                f"{path} has more than {_MOST_BYTES >> 10} KiB of patterns, which take long to"
                " match. Name folders instead of their files"
            )
        lines = path.read_text(
            encoding="utf-8", errors="replace" if of_git else "strict"
        ).splitlines()
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        if not of_git:
            raise ConfigError(f"cannot read {path}: {error}") from error
    patterns = []
    for number, line in enumerate(lines, 1):
        try:
            IgnorePatterns([line])
            patterns.append(line)
        except ValueError as error:  # pathspec raises a subclass
            if not of_git:
                why = f"is not a pattern of a .gitignore: {error}"
                raise ConfigError(f"{path}, line {number}: {line!r} {why}") from error
    return IgnorePatterns(patterns)
