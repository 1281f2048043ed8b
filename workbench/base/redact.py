"""Mask secrets in text and in JSON values. Pure; masking never raises.

A mask has the length of the secret and keeps line ends, so log offsets and JSON stay valid. The
input may be any text, such as a rank's output. Every repetition in a pattern is bounded, without
backtracking, and a long line is masked in pieces: the time grows linearly with the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

# Words of a variable's name, divided at underscores, digits and capitals within the name.
_WORDS = re.compile(r"[A-Z]{1,200}(?![a-z])|[A-Z]?[a-z]{1,200}")
_SECRET_WORDS = frozenset(
    [
        "TOKEN",
        "TOKENS",
        "SECRET",
        "SECRETS",
        "PASS",
        "PASSWORD",
        "PASSWORDS",
        "PASSWD",
        "PASSPHRASE",
        "PASSCODE",
        "COOKIE",
        "JWT",
        "BEARER",
        "PWD",
        "CREDENTIAL",
        "CREDENTIALS",
        "KEY",
        "KEYS",
        "APIKEY",
        "AUTH",
        "AUTHORIZATION",
        "PRIVATE",
        "WEBHOOK",
        "DSN",
        "CONN",
        "CONNECTION",
    ]
)
# Ends of words that are written together, as in PGPASS and SSHKEY, and words of their own.
_SECRET_ENDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PWD", "KEY")
_ORDINARY = frozenset(
    [
        *("KEY", "DONKEY", "FLUNKEY", "HOCKEY", "HOTKEY", "JOCKEY", "LACKEY", "MONKEY", "TURKEY"),
        *("PASS", "BYPASS", "COMPASS", "ENCOMPASS", "OVERPASS", "SURPASS", "TRESPASS", "UNDERPASS"),
        *("TOKEN", "WHISKEY"),
    ]
)
_SECRET_LAST = frozenset({"PAT", "URI", "URL", "PROXY"})
# Names like MAX_TOKENS and SORT_KEY: a count, or the field of a table.
_COUNTS = frozenset(
    ["MAX", "MIN", "NUM", "N", "TOTAL", "COUNT", "LIMIT", "NEW", "PER", "SPECIAL", "BATCH"]
)
_FIELDS = frozenset(
    [
        "SORT",
        "ORDER",
        "GROUP",
        "PRIMARY",
        "FOREIGN",
        "PARTITION",
        "INDEX",
        "ROW",
        "COLUMN",
        "PUBLIC",
        "TEXT",
        "LABEL",
        "FEATURE",
        "INPUT",
        "OUTPUT",
        "TARGET",
        "PROMPT",
        "QUESTION",
        "ANSWER",
    ]
)
_COUNTED = frozenset({"TOKEN", "TOKENS", "CONN", "CONNECTION"})
_KEYS = frozenset({"KEY", "KEYS"})
# These stand in every JSON and in every log: a mask would destroy the text and hide nothing.
_NUMBER_VALUE = re.compile(
    r"[+-]?(?:[\d.,:_]{1,400}+(?:[eE][+-]?\d{1,9}+)?|inf|nan)", re.IGNORECASE
)
_JSON_WORDS = frozenset({"true", "false", "null", "none", "yes", "no", "on", "off"})
# A tokenizer's mark, as </s>, <|im_end|> and [PAD]: answers of models are full of them.
_TOKEN_VALUE = re.compile(r"<[/|｜]?(?:[^\W\d]|[▁ -]){1,40}+\d{0,3}[|｜]?>|\[[A-Z_]{1,40}\]")
# A name, an address or a path, as zero3-offload, 127.0.0.2, /data/run-1 and Qwen2.5-0.5B.
_PART = r"(?:(?:[A-Z]?[a-z]{1,400}+|[A-Z]{1,400}+)\d{0,2}|\d{1,20}[A-Za-z]?)"
_WORD_VALUE = re.compile(rf"[-_./:~ ]{{0,9}}{_PART}?(?:[-_./:~ ]{{1,9}}+{_PART}?){{0,400}}")
NAMES = frozenset(
    [
        "kind",
        "state",
        "phase",
        "name",
        "technique",
        "model",
        "family",
        "launcher",
        "precision",
        "peft",
        "pod",
        "host",
        "address",
        "path",
        "of",
        "id",
        "run",
        "what",
        "wish",
        "root",
        "python",
        "user",
        "backend",
        "hosts",
    ]
)
"""Keys of records whose values the program reads back, such as the state of a run."""
_STRING = re.compile(r'"((?:[^"\\]|\\.)*+)"(\s{0,9}:)?')
_DEEPEST = 200
# A mode, a number, a path: masking such values would make logs unreadable and hide nothing.
_PLAIN = re.compile(r"[a-z_-]*|[A-Z_-]*|[\d.,:+-]*|[/~.][\w./:+~-]*")
_LEAST = 4  # characters of a value whose name says that it is a secret
_LEAST_UNNAMED = 8
# Interfaces and devices, such as bond0.100, are readable in the log of NCCL.
_NETWORK = ("NCCL_", "GLOO_", "FI_", "UCX_", "OMPI_MCA_")
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
            r"(?i:token|secret|password|(?<!/etc/)passwd|pwd|api[_-]?key|access[_-]?key|auth|credential)s?\\?[\"']?\s{0,2}[:=]"
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
    bare = value.strip()
    if bare.lower() in _JSON_WORDS or _NUMBER_VALUE.fullmatch(bare) or _TOKEN_VALUE.fullmatch(bare):
        return False
    if is_secret_name(name):
        return len(value) >= _LEAST
    if name.startswith(_NETWORK):
        return False
    return len(value) >= _LEAST_UNNAMED and not _PLAIN.fullmatch(value)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, for any value."""
    words = [word.upper() for word in _WORDS.findall(name)]
    found = _SECRET_WORDS.intersection(words)
    if not _COUNTS.isdisjoint(words):
        found -= _COUNTED
    if not _FIELDS.isdisjoint(words):
        found -= _KEYS
    if found or (words[-1:] and words[-1] in _SECRET_LAST):
        return True
    return any(word.endswith(_SECRET_ENDS) for word in words if word not in _ORDINARY)


class Redactor:
    """Masks secret values of environments, and any text in the form of a secret."""

    def __init__(self, *environments: Mapping[str, str]) -> None:
        self._own: frozenset[str] = frozenset()  # without those of runs
        self._values: tuple[str, ...] = ()
        # Without secrets that are words, for values that the program reads back.
        self._strange: tuple[str, ...] = ()
        for environment in environments:
            self.learn(environment)

    def learn(self, environment: Mapping[str, str]) -> None:
        """Mask the secrets among these values from now on."""
        secrets = [value for name, value in environment.items() if is_secret(name, value)]
        forms = {form for value in secrets for form in _forms(value)}
        self._own |= forms
        self._mask_also(forms)

    def of_run(self, *environments: Mapping[str, str]) -> Redactor:
        """Return a redactor for the record of a run, and mask the run's secrets here too.

        The returned one knows no secrets of other runs: a word that is a password there changes
        nothing here.
        """
        run = Redactor(*environments)
        self._mask_also(run._values)
        run._own |= self._own
        run._mask_also(self._own)
        return run

    def _mask_also(self, forms: Collection[str]) -> None:
        self._values = tuple(sorted({*self._values, *forms}, key=len, reverse=True))
        self._strange = tuple(value for value in self._values if not _WORD_VALUE.fullmatch(value))

    def __call__(self, text: str) -> str:
        """Return a text with its secrets masked.

        Example:
            >>> Redactor({"PGPASS": "opensesame"})("login opensesame at https://me:pw@host")
            'login ********** at https://me:**@host'
        """
        return self._mask(text, self._values)

    def _mask(self, text: str, values: Sequence[str]) -> str:
        masked = text
        for value in values:
            if value in masked:
                masked = masked.replace(value, _stars(value))
        # Of the original text: a masked value may be the context of another secret.
        looks = mask_secrets(text)
        if text in (masked, looks):
            return looks if text == masked else masked
        return _both(masked, looks)

    def blob(self, data: bytes, mark: str = "") -> bytes:
        """Mask a piece of a log. JSON after `mark` at the begin of a line stays JSON."""
        text = data.decode("latin-1")
        if not mark or mark not in text:
            return self(text).encode("latin-1")
        parts: list[str] = []
        between: list[str] = []
        for line in re.findall(r"[^\n]*\n|[^\n]+", text):
            if line.startswith(mark) and _is_json(line[len(mark) :]):
                parts += [self("".join(between)), self._json_line(line)]
                between = []
            else:
                between.append(line)
        return "".join([*parts, self("".join(between))]).encode("latin-1")

    def _json_line(self, line: str) -> str:
        """Mask the strings of a line of JSON in place."""
        key = ""

        def masked(match: re.Match[str]) -> str:
            nonlocal key
            inner, colon = match.groups()
            if colon:
                key = inner
                return f'"{self._key(inner)}"{colon}'
            return f'"{self._leaf(key, inner, key in NAMES)}"'

        return _STRING.sub(masked, line)

    def json(self, data: Mapping[str, Any], names: Collection[str] = NAMES) -> dict[str, Any]:
        """Return a JSON object with the secrets in its strings masked.

        Numbers, literals and the program's own keys stay. Below a key of `names`, secrets that
        are plain words stay too: the program reads these values back.

        Example:
            >>> redact = Redactor({"DB_PASSWORD": "local"})
            >>> redact.json({"kind": "local", "step": 1, "message": "user local is unknown"})
            {'kind': 'local', 'step': 1, 'message': 'user ***** is unknown'}
        """
        return {
            self._key(str(key)): self._value(str(key), value, key in names, names, 0)
            for key, value in data.items()
        }

    def _value(self, key: str, value: Any, named: bool, names: Collection[str], depth: int) -> Any:
        if depth > _DEEPEST:
            return "***"
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {
                self._key(str(k)): self._value(str(k), v, named or k in names, names, depth + 1)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(key, each, named, names, depth + 1) for each in value]
        return self._leaf(key, str(value), named)

    def _leaf(self, key: str, text: str, named: bool) -> str:
        values = self._strange if named else self._values
        masked = self._mask(text, values)
        # A key such as api_key is the context of a secret.
        before = f"{key}="
        looks = mask_secrets(before + text)[len(before) :]
        return masked if looks == text else _both(masked, looks)

    def _key(self, key: str) -> str:
        # The program's own keys are identifiers.
        return mask_secrets(key) if key.isidentifier() else self._mask(key, self._strange)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _both(masked: str, looks: str) -> str:
    return "".join("*" if "*" in pair else pair[0] for pair in zip(masked, looks, strict=True))


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
        data = _bytes(text)
        yield from (text, json.dumps(text)[1:-1], quote(data, safe=""), data.decode("latin-1"))


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")  # as in the environment
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
