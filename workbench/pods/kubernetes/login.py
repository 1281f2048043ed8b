"""The login helper of a kubeconfig (`exec`): run with a time limit, and quoted after a failure.

The Kubernetes client logs a failed helper and sends the request without credentials. The module
raises instead. No message has the helper's answer, as the answer has a token.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.child import kill_group
from workbench.base.errors import BackendError
from workbench.base.words import strip_controls
from workbench.pods.pod import Report

_LIMIT_S = 60.0
_LOOK_S = 0.2
_QUIET_S = 3.0  # most helpers have ended by then, and a warning of theirs is no news
_MOST_WORDS = 1500  # a login URL with its parameters has some hundred letters
_TOKEN = re.compile(r"[!-~]+")
_PEM = "-----BEGIN"
_AGAIN = "Log in in a terminal, for example with `kubectl get pods`, then try again"


class LoginFailed(Exception):
    """The helper returned no credentials. The words continue "the kubeconfig cannot be used:"."""


def _warn(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginWait:
    limit_s: float = _LIMIT_S
    """Seconds that a helper may take."""
    report: Report = _warn
    """Receives the words of a helper that waits, such as the URL of a login page."""
    is_given_up: Callable[[], bool] = bool
    """Whether the caller wants no login any more; by default never."""


def credentials(
    helper: Mapping[str, Any], cluster: Mapping[str, Any] | None, folder: str, wait: LoginWait
) -> Mapping[str, Any]:
    """Run a login helper and return the `status` of the answer, with a token or a certificate.

    Args:
        helper: The section `exec` of the kubeconfig's user.
        cluster: The kubeconfig's cluster if the helper asks for the cluster, or None.
        folder: Folder of the file that names the helper.
        wait: Time limit, and the receiver of the helper's words.

    Raises:
        LoginFailed: The helper is missing, failed, took too long or printed no credentials.
        BackendError: The caller gave up.
    """
    argv = [str(helper["command"]), *map(str, helper.get("args") or ())]
    name = _name(argv)
    version = helper["apiVersion"]
    # A helper in a terminal may ask for a password.
    in_terminal = all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout))
    interactive = in_terminal and helper.get("interactiveMode") != "Never"
    asked: dict[str, Any] = {"interactive": interactive}
    if cluster is not None:
        asked["cluster"] = cluster
    # The protocol of Kubernetes: the request in a variable, the answer on standard output.
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": asked}
    own = {str(each["name"]): str(each["value"]) for each in helper.get("env") or ()}
    try:
        process = subprocess.Popen(
            argv,
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if interactive else subprocess.PIPE,
            cwd=folder or None,
            env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            start_new_session=not interactive,
        )
    except FileNotFoundError as error:
        hint = strip_controls(
            str(helper.get("installHint") or "Install it, or use another kubeconfig")
        )
        raise LoginFailed(f"its login helper {name} is not on this machine. {hint}") from error
    except OSError as error:
        words = error.strerror
        raise LoginFailed(f"its login helper {name} cannot be started: {words}") from error
    with process:
        try:
            answer, said = _await(process, name, wait)
        # An interrupt must not leave a helper that waits for a browser.
        except BaseException:
            _kill(process, alone=interactive)
            raise
    if process.returncode != 0:
        raise LoginFailed(
            f"its login helper {name} ended with exit code {process.returncode}:"
            f" {_words(said) or 'it gave no reason'}. {_AGAIN}"
        )
    status, lacks = _read(answer, version)
    if lacks:
        raise LoginFailed(
            f"its login helper {name} printed no credentials: {lacks}."
            f" It says: {_words(said) or 'nothing'}. {_AGAIN}"
        )
    return status


def _await(process: subprocess.Popen[bytes], name: str, wait: LoginWait) -> tuple[bytes, bytes]:
    """Wait for the end of a helper and report the helper's words; LoginFailed at the time limit."""
    began_s = time.monotonic()
    said = b""
    told = ""
    while True:
        try:
            answer, all_said = process.communicate(timeout=_LOOK_S)
            return answer, all_said or b""
        except subprocess.TimeoutExpired as waiting:
            said = waiting.stderr or b""
        if wait.is_given_up():
            raise BackendError(f"the login helper {name} was stopped before it had ended")
        words = _words(said)
        waited_s = time.monotonic() - began_s
        if waited_s >= wait.limit_s:
            raise LoginFailed(
                f"its login helper {name} has not ended after {wait.limit_s:.0f} s."
                f" It says: {words or 'nothing'}. {_AGAIN}"
            )
        if waited_s >= _QUIET_S and words != told:
            told = words
            wait.report(f"the kubeconfig's login helper {name} waits: {words}")


def _kill(process: subprocess.Popen[bytes], *, alone: bool) -> None:
    """End a helper, with all programs started by the helper unless both share our group."""
    if alone:
        process.kill()
    else:
        kill_group(process)


def _name(argv: Sequence[str]) -> str:
    """Return the command without options: options may hold a secret of the client."""
    command, *words = argv
    parts = [Path(command).name]
    for word in words:
        if word.startswith("-"):
            break
        parts.append(word)
    return strip_controls(" ".join(parts))


def _words(said: bytes) -> str:
    return strip_controls(said.decode(errors="replace")[-_MOST_WORDS:])


def _read(answer: bytes, version: str) -> tuple[Mapping[str, Any], str]:
    """Return the status of a helper's answer, or what the answer lacks. Quotes nothing."""
    try:
        found = json.loads(answer)
    except ValueError:
        return {}, "its output is no JSON" if answer.strip() else "its output is empty"
    if not isinstance(found, dict) or found.get("kind") != "ExecCredential":
        return {}, "its output is no ExecCredential"
    if found.get("apiVersion") != version:
        return {}, f"its output is of another version than {version}, which the kubeconfig names"
    status = found.get("status")
    if not isinstance(status, dict):
        return {}, "its output has no status"
    token, ends = status.get("token"), status.get("expirationTimestamp", "")
    pair = [status.get(key) for key in ("clientCertificateData", "clientKeyData")]
    if token is None and not all(isinstance(each, str) and _PEM in each for each in pair):
        return {}, "its output has neither a token nor a certificate with its key"
    if token is not None and not is_token(token):
        return {}, "its token is empty, or has a blank, a line break or another odd character"
    if not isinstance(ends, str):
        return {}, "its expirationTimestamp is no text"
    return status, ""


def is_token(value: object) -> bool:
    """Whether a token can stand in the header of a request."""
    return isinstance(value, str) and bool(_TOKEN.fullmatch(value))
