"""Time every regular expression of the package, and its masking and parsing, on slow texts.

Run as a program: one line of JSON for each whose processor
time grows faster than its text, "done" at the end.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import workbench

ROOT = Path(workbench.__file__).parent
# Of processor time. Below the limit nothing is looked at further. Above it the growth decides,
# for a busy machine takes longer over everything.
LIMIT_S, TEXT_BYTES = 0.5, 64 << 10
PATTERN_LIMIT_S, PATTERN_BYTES = 0.1, 16 << 10
GIVEN_UP = 20  # times the limit
LINEAR = (
    8.0  # at most so many times the time of a quarter of the text: linear is 4, quadratic is 16
)
FIXED = [
    *(
        "token=",
        "aaaaaaaa",
        "........",
        "00000000",
        "://a:b@",
        "token=a1",
        "passwd:",
        "a1a1a1a1",
        "eyJ-----",
        "eyJaaaa.",
    ),
    *(
        "Bearer a",
        "sk-aaaaa",
        "        ",
        "\n",
        "\n\n a: b ",
        "\x1b[",
        "\x1b]",
        '"',
        "''",
        "a b ",
        "(((((",
        "(a): a(",
        "): a(a",
    ),
    *(
        "Channel ",
        "NCCL INF",
        "NET/a : ",
        "1 = 1% ",
        "1.1.1.1.",
        "1e1e1e1e",
        "- - - - ",
        'File "a',
        "a/b/c/",
        "=1,=1,",
        " AND a =",
    ),
    *(
        "::::::::",
        "@@@@",
        "\\n\\n",
        "{%-  ",
        "<svg <",
        "<!--",
        "-----BEG",
        "[rank1]",
        "+ - |",
        "SELECT a",
        "0:00:00.",
        "${a}${a",
        "\t",
        "é",
    ),
]
# What is compiled from a name that no module holds: where, and the expressions that come there.
LOCAL: dict[str, Callable[[], list[str]]] = {
    "base/redact.py: pattern": lambda: [],  # they are in `_LOOKS`
    "finetune/profile/parse.py: pattern": lambda: list(
        module("finetune.profile.parse")._HEADER.values()
    ),
    "finetune/advice/rules.py: pattern": lambda: [
        p for ps in module("finetune.advice.rules")._MEMORY.values() for p in ps
    ],
    "finetune/advice/rules.py: rule.words": lambda: [
        rule.words for rule in module("finetune.advice.rules")._RULES
    ],
    "finetune/options/text/templates.py: pattern": lambda: [r"[.'\"]reasoning_content\b"],
    "finetune/profile/speed.py: name": lambda: [
        name for name, _ in module("finetune.profile.speed")._PEAKS
    ],
    "jobs/script.py: copy": lambda: [r"""(?<=["'(])/[^"'\n]*/r1/script/own(?=[/"')])"""],
}
# Of a name or a label of ours in a short text of ours.
OURS = (
    "display/compose/fields.py",
    "keeper/run/runner.py",
    "finetune/data/sources/files.py",
    "base/record/record.py",
    "display/kit/plots/static.py",
)


def module(name: str) -> Any:
    return importlib.import_module(f"workbench.{name}")


def patterns() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """Yield each pattern of the package with where it is, and the method by which it is used."""
    sources = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    used: dict[str, set[str]] = {}
    for name, method in re.findall(
        r"\b(\w+)\.(search|match|fullmatch|sub|findall|finditer|split)\b",
        "\n".join(sources.values()),
    ):
        used.setdefault(name, set()).add(method)
    for path, source in sources.items():
        where = path.relative_to(ROOT).as_posix()
        if where in OURS or "\nimport re\n" not in source:
            continue
        space = vars(module(where.removesuffix(".py").removesuffix("/__init__").replace("/", ".")))
        tree = ast.parse(source)
        names = {
            id(node.value): node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=method)) if (
                    method != "escape"
                ):
                    methods = used.get(names.get(id(node), ""), set())
                    yield from of_call(
                        where, node, methods if method == "compile" else {method}, space
                    )
        for name, value in list(space.items()):
            for pattern in held(value):
                yield f"{where}: {name}", pattern, "search"


def of_call(
    where: str, node: ast.Call, methods: set[str], space: dict[str, Any]
) -> Iterator[tuple[str, re.Pattern[Any], str]]:
    expression = ast.unparse(node.args[0])
    try:
        found = [eval(expression, dict(space))]  # of the package's own source
    except NameError:
        found = LOCAL[f"{where}: {expression}"]()
    flags = re.DOTALL if "DOTALL" in ast.unparse(node) else 0
    flags |= re.IGNORECASE if "IGNORECASE" in ast.unparse(node) else 0
    flags |= re.MULTILINE if "MULTILINE" in ast.unparse(node) else 0
    anchored = bool(methods) and methods <= {"match", "fullmatch"}
    for each in found:
        yield (
            f"{where}:{node.lineno}",
            re.compile(each, flags),
            "fullmatch" if anchored else "search",
        )


def held(value: object, depth: int = 2) -> Iterator[re.Pattern[Any]]:
    """Yield the patterns in a container; those that stand alone are seen where compiled."""
    if isinstance(value, (list, tuple)) and depth:
        for each in value:
            if isinstance(each, re.Pattern):
                yield each
            yield from held(each, depth - 1)


def grams(number: int) -> list[str]:
    rng = random.Random(28)
    letters = "ab01 .:/=@-_\n\t\"'\\(){}[]<>%+,;|#$*?!éZ"
    return FIXED + ["".join(rng.choice(letters) for _ in range(8)) for _ in range(number)]


def texts_for(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Yield texts that begin to match everywhere and never end, made from a pattern's own parts."""
    from re import _parser  # type: ignore[attr-defined]

    source = (
        pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    )
    parts = [
        sample(part) for part in _parser.parse(source, pattern.flags & ~re.DEBUG & ~re.UNICODE)
    ]
    for end in range(1, min(len(parts), 12) + 1):
        begin = "".join(parts[:end])
        yield begin
        yield begin[:-1]
        if parts[end - 1]:
            yield (
                "\0" + begin + "\0" + parts[end - 1][-1]
            )  # once, and then its last character for ever


def sample(part: Any) -> str:
    """Return a text that a part of a pattern matches."""
    op, value = part
    match str(op), value:
        case "LITERAL", code:
            return chr(code)
        case "IN", [first, *_]:
            return sample(first)
        case "RANGE", (low, _):
            return chr(low)
        case "NOT_LITERAL" | "ANY" | "NEGATE", _:
            return "x"
        case "CATEGORY", kind:
            return {"SPACE": " ", "DIGIT": "0", "WORD": "a"}.get(str(kind).rpartition("_")[2], "x")
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT", (least, _, inside):
            return "".join(map(sample, inside)) * min(max(least, 1), 40)
        case "SUBPATTERN", (*_, inside):
            return "".join(map(sample, inside))
        case "BRANCH", (_, [first, *_]):
            return "".join(map(sample, first))
    return ""


def long(gram: str, size: int) -> str:
    # A pattern may have the character itself as a sample.
    if gram.startswith("\0") and gram.count("\0") > 1:
        _, begin, character = gram.split("\0", 2)
        return begin + character * (size // max(1, len(character.encode())))
    return (gram * (size // max(1, len(gram.encode())) + 1))[:size]


def uses() -> dict[str, Callable[[str], object]]:
    """What masks and parses foreign text."""
    from workbench.agent.ranks.records import failure_from
    from workbench.base.redact import Redactor, mask_secrets
    from workbench.base.words import strip_controls
    from workbench.display.kit.logs import clean, fold
    from workbench.finetune.advice.rules import advise
    from workbench.finetune.data.wikisql.query import parse
    from workbench.finetune.profile.parse import parse_profile
    from workbench.rundir.figures.flight import nccl_words
    from workbench.rundir.output.collect import _unfinished
    from workbench.rundir.result import RunFault

    begin = "DeepSpeed Flops Profiler\n"
    return {
        "mask_secrets": mask_secrets,
        "Redactor": Redactor({"PASSWORD": "opensesame"}),
        "Redactor.blob": lambda text: Redactor().blob(text.encode("latin-1", "replace")),
        "Redactor.learn": lambda text: Redactor({"TOKEN": text[: 64 << 10]}),
        "collect": lambda text: _unfinished(text.encode()),
        "profile head": lambda text: parse_profile(begin + text),
        "profile modules": lambda text: parse_profile(
            f"{begin}Detailed Profile per GPU\nA(\n{text}"
        ),
        "profile figures": lambda text: parse_profile(f"{begin}params of model per GPU = {text}"),
        "nccl_words": lambda text: nccl_words(
            [f"NCCL INFO Channel 0 : {text}", *f"NCCL INFO {text}".split("\n")]
        ),
        "clean": clean,
        "fold": lambda text: fold({0: [text], 1: [text]}),
        "plain": strip_controls,
        "sql": lambda text: parse(text[:20_000]),
        "advise": lambda text: advise(RunFault(kind="exit", message=text, traceback=text)),
        "failure_from": lambda text: failure_from(text, 1),
    }


class TooLong(Exception):
    pass


def timed(
    what: str, gram: str, act: Callable[[Any], object], text: str | bytes, limit_s: float
) -> None:
    """Do it, and print a line where the time grows faster than the text."""
    took_s = seconds_of(act, text, limit_s)
    if took_s <= limit_s:
        return
    quarter = text[: len(text) // 4]
    whole_s = min(took_s, *(seconds_of(act, text, limit_s) for _ in range(2)))
    quarter_s = min(seconds_of(act, quarter, limit_s) for _ in range(3))
    if whole_s == math.inf or whole_s > LINEAR * quarter_s:
        print(json.dumps({"what": what, "gram": gram[:60], "took_s": str(whole_s)}), flush=True)


def seconds_of(act: Callable[[Any], object], text: str | bytes, limit_s: float) -> float:
    """Return the processor time; infinity: it was given up."""
    began_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP * limit_s)
    try:
        act(text)
    except (TooLong, RecursionError):
        return math.inf
    except (ValueError, RuntimeError):  # a refusal; what is asked here is how long it took
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return time.process_time() - began_s


def main(part: str) -> None:
    def give_up(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, give_up)
    if part == "uses":
        for name, use in uses().items():
            for gram in grams(12) if name == "Redactor" else [*FIXED[:24], *grams(4)[-4:]]:
                text = long(gram, TEXT_BYTES)
                timed(name, gram, use, text, LIMIT_S)
    else:
        found = list(dict.fromkeys(patterns()))
        print(json.dumps({"patterns": len(found)}), flush=True)
        texts = {gram: long(gram, PATTERN_BYTES) for gram in [*FIXED[:20], *grams(8)[-8:]]}
        for where, pattern, method in found:
            if where.startswith(
                "finetune/data/wikisql/query.py"
            ):  # which refuses longer texts, and matches from their start
                texts_here, method = (
                    {gram: text[:20_000] for gram, text in texts.items()},
                    "fullmatch",
                )
            else:
                texts_here = texts
            made = {gram: long(gram, PATTERN_BYTES) for gram in texts_for(pattern) if gram}
            for gram, text in {**texts_here, **made}.items():
                subject = text.encode() if isinstance(pattern.pattern, bytes) else text
                run = (
                    pattern.fullmatch
                    if method == "fullmatch"
                    else lambda s, p=pattern: all(True for _ in p.finditer(s))
                )
                timed(
                    f"{where} {pattern.pattern!r:.80}",
                    gram,
                    run,
                    subject,
                    PATTERN_LIMIT_S,
                )
    print('"done"', flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
