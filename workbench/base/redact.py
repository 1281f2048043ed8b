"""Mask secrets in text. Pure.

A mask has the length of the secret and keeps line ends, so log offsets and JSON stay valid. The
input may be any text, such as a rank's output. Every repetition in a pattern is bounded, without
backtracking, and a long line is masked in pieces: the time grows linearly with the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|PWD|CREDENTIAL|KEY|AUTH|PRIVATE|WEBHOOK|DSN|CONN|(?:^|_)(?:PAT|URI|URL|PROXY)$",
    re.IGNORECASE,
)
# A mode, a number, a path: masking such values would make logs unreadable and hide nothing.
_PLAIN = re.compile(r"[a-z_-]*|[A-Z_-]*|[\d.,:+-]*|[/~.][\w./:+~-]*")
_LEAST = 4  # characters of a value whose name says that it is a secret
_LEAST_UNNAMED = 8
_DIGIT = re.compile(r"\d")
_LETTER = re.compile(r"[A-Za-z]")
_STAR = re.compile(r"\*")
# Characters of a line that are masked at once, with an overlap: a secret up to the overlap's length
# is whole in one of two pieces.
_PIECE = 8 << 10
_OVERLAP = 4 << 10
_BETWEEN = re.compile(r"[\s:;@=/?,&\"'{}]+")

_PREFIX = r"(?:\[?[\w.:-]{1,40}\]?:[ ])?"  # pdsh and torch put a host or rank before every line
_PEM_LINE = (
    rf"(?:\s|\\[nr]){{1,200}}{_PREFIX}(?:[\w-]{{1,60}}:[ ][\w,. -]{{1,60}}|[A-Za-z0-9+/=]{{1,80}})"
)
# The rest of a key that another process's output interrupts; matched backwards, from the key's end.
_PEM_REST = re.compile(
    r"-----YEK ETAVIRP[ A-Z]{0,30}DNE-----"
    r"(?:(?:[ ]:\]?[\w.:-]{1,40}\[?)?(?:\s|[nr]\\){1,200}[A-Za-z0-9+/=]{1,80}(?!\\))*"
)
_NUMBER = r"-?[\d.]{1,400}+(?:[eE][+-]?\d{1,9}+)?(?![\w-])"
_PEM = re.compile(
    rf"-----BEGIN[ A-Z]{{0,30}}PRIVATE KEY-----(?:{_PEM_LINE})*"
    rf"(?:(?:\s|\\[nr]){{0,200}}{_PREFIX}-----END[ A-Z]{{1,60}}-----)?"
)
# Patterns, with strings that a matching text must contain: searching for the strings is a hundred
# times as fast. If a pattern has a group, only the group is masked.
_LOOKS = [
    (hints, re.compile(pattern))
    for pattern, *hints in (
        (r"\bhf_[A-Za-z0-9]{16,}", "hf_"),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", "AKIA", "ASIA"),
        (r"\bgh[opusr]_[A-Za-z0-9]{20,}", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
        (r"\bgithub_pat_\w{20,}", "github_pat_"),
        (r"\bglpat-[\w-]{16,}", "glpat-"),
        (r"\bsk-[\w-]{16,}", "sk-"),
        (r"\bxox[a-z]-[\w-]{8,}", "xox"),
        (r"\bAIza[\w-]{30,}", "AIza"),
        (r"\bnvapi-[\w-]{20,}", "nvapi-"),
        (r"\bnpm_[A-Za-z0-9]{20,}", "npm_"),
        (r"\bpypi-[\w-]{30,}", "pypi-"),
        (r"\beyJ[\w-]{8,400}+\.[\w-]{8,8000}+\.[\w-]{4,}", "eyJ"),
        (r"hooks\.slack\.com/services/([\w/]{16,})", "hooks.slack"),
        (
            r"\b[Bb](?:earer|EARER|asic|ASIC)\s{1,2}((?=[^\s\d]{0,100}+\d)[\w.~+/=-]{8,})",
            *("earer ", "EARER ", "asic ", "ASIC "),
        ),
        (r"://[^\s/:@\"'\\]{0,200}+:([^\s/@\"'\\]{1,2000}+)@", "://"),
        (r"://([\w-]{16,2000}+)@", "://"),
        (
            r"(?:AccountKey|SharedAccessKey|[?&;]sig)=([\w+/%=-]{16,})",
            "AccountKey",
            "SharedAccessKey",
            "sig=",
        ),
        (
            r"(?i:token|secret|passw(?:or)?d|pwd|api[_-]?key|access[_-]?key|auth|credential)s?\\?[\"']?\s{0,2}[:=]"
            rf"\s{{0,2}}\\?[\"']?((?!{_NUMBER})(?=[^\s\"',;&\d]{{0,100}}+\d)(?=[^\s\"',;&A-Za-z]{{0,100}}+[A-Za-z])"
            r"[\w+=%!#^*-][^\s\"',;&<>(){}\[\]\\]{7,})",
            *(
                "oken",
                "OKEN",
                "ecret",
                "ECRET",
                "assw",
                "ASSW",
                "pwd",
                "PWD",
                "auth",
                "AUTH",
                "Auth",
            ),
            *("key", "KEY", "Key", "redential", "REDENTIAL"),
        ),
    )
]


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value is hidden wherever it shows up.

    Example:
        >>> is_secret("NCCL_DEBUG", "INFO")
        False
        >>> is_secret("PGPASS", "opensesame"), is_secret("MY_SETTING", "x7-Qp22-moon")
        (True, True)
    """
    if _SECRET_NAME.search(name):
        return len(value) >= _LEAST
    return len(value) >= _LEAST_UNNAMED and not _PLAIN.fullmatch(value)


class Redactor:
    """Masks secret values of environments, and any text in the form of a secret."""

    def __init__(self, *environments: Mapping[str, str]) -> None:
        self._values: tuple[str, ...] = ()
        for environment in environments:
            self.learn(environment)

    def learn(self, environment: Mapping[str, str]) -> None:
        """Mask the secrets among these values from now on."""
        secrets = [value for name, value in environment.items() if is_secret(name, value)]
        forms = {form for value in secrets for form in _forms(value)}
        self._values = tuple(sorted({*self._values, *forms}, key=len, reverse=True))

    def __call__(self, text: str) -> str:
        """Return a text with its secrets masked.

        Example:
            >>> Redactor({"PGPASS": "opensesame"})("login opensesame at https://me:pw@host")
            'login ********** at https://me:**@host'
        """
        masked = text
        for value in self._values:
            if value in masked:
                masked = masked.replace(value, _stars(value))
        # Of the original text: a masked value may be the context of another secret.
        looks = mask_secrets(text)
        if text in (masked, looks):
            return looks if text == masked else masked
        return "".join("*" if "*" in pair else pair[0] for pair in zip(masked, looks, strict=True))

    def blob(self, data: bytes) -> bytes:
        return self(data.decode("latin-1")).encode("latin-1")

    def json(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a JSON object with its secrets masked, in keys and values."""
        text = json.dumps(data, default=str)
        masked = self(text)
        return dict(data) if masked == text else json.loads(masked)


def mask_secrets(text: str) -> str:
    """Mask what looks like a key, a token or a password.

    Example:
        >>> mask_secrets("GET /?api_key=a1b2c3d4e5 as Bearer abc123def")
        'GET /?api_key=********** as Bearer *********'
        >>> mask_secrets("loss 3.25, tokens: 12345678")
        'loss 3.25, tokens: 12345678'
    """
    # First: another pattern may match within a key, and then no key is found.
    if "PRIVATE KEY-----" in text:
        text = _PEM.sub(_masked, text)
        text = _PEM_REST.sub(_masked, text[::-1])[::-1]
    if looks := [pattern for hints, pattern in _LOOKS if any(map(text.__contains__, hints))]:
        return "".join(_mask_piece(each, looks) for each in _pieces(text))
    return text


def _pieces(text: str) -> Iterator[str]:
    """Split a text into its long lines and the text in between."""
    between: list[str] = []
    for line in text.splitlines(keepends=True) if len(text) > _PIECE else [text]:
        if len(line) <= _PIECE:
            between.append(line)
            continue
        yield "".join(between)
        yield line
        between = []
    yield "".join(between)


def _mask_piece(text: str, looks: Sequence[re.Pattern[str]]) -> str:
    """Mask short lines at once, and a long line in overlapping pieces."""
    if len(text) <= _PIECE or "\n" in text[:_PIECE]:
        for pattern in looks:
            text = pattern.sub(_masked, text)
        return text
    masked = list(text)
    for begin in range(0, len(text), _PIECE):
        piece = text[begin : begin + _PIECE + _OVERLAP]
        for pattern in looks:
            piece = pattern.sub(_masked, piece)
        for place in (match.start() for match in _STAR.finditer(piece)):
            masked[begin + place] = "*"
    return "".join(masked)


def _masked(match: re.Match[str]) -> str:
    start, end = (at - match.start() for at in match.span(match.lastindex or 0))
    return match[0][:start] + _stars(match[0][start:end]) + match[0][end:]


def _stars(text: str) -> str:
    return re.sub(r"\S", "*", text)


def _forms(value: str) -> Iterator[str]:
    """Yield the forms of a secret: whole, by line, its parts, in JSON, in a URL, as UTF-8 bytes."""
    long = [part for part in _BETWEEN.split(value) if len(part) >= _LEAST_UNNAMED]
    telling = [part for part in long if _DIGIT.search(part) and _LETTER.search(part)]
    password = re.findall(r"://[^\s/:@]{0,400}+:([^\s/@]{4,2000}+)@", value)
    for text in (
        value,
        *(line for line in value.splitlines() if len(line) >= _LEAST_UNNAMED and "--" not in line),
        *telling,
        *password,
    ):
        yield from (
            text,
            json.dumps(text)[1:-1],
            quote(text, safe=""),
            text.encode().decode("latin-1"),
        )
