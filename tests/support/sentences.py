"""Catalogue of the sentences that users read, so that tests name a sentence and its figures.

`tests/sentences.txt` has one sentence a line: `identity = 'template'`. A placeholder is `{}`.
An identity is `room.module.function.few-words`. The words are those of the first wording.
An identity stays when a sentence is reworded. Tests quote the identity, and never the wording:

    with pytest.raises(ConfigError, match=sentence("pods.hosts.check.sshd-missing", "pod-1")):
    assert says(panel, "display.state.waiting.pods-missing", 3)

`make sentences` (`python -m tests.support.sentences`) writes the file anew from the
package. Where a function moved, the command renames the identities in the tests as well.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Catalogue", "Sentence", "collect", "dump", "load", "says", "sentence", "update"]

TESTS = Path(__file__).resolve().parent.parent
PACKAGE = TESTS.parent / "workbench"
GOLDEN = TESTS / "sentences.txt"
COMMAND = "make sentences"

HOLE = "{}"
"""Placeholder of a template."""

WORDS_OF_SENTENCE = 3
"""Words that make a string a sentence. An argument of an error needs a single word."""

SIMILAR_IN_FUNCTION = 0.25
SIMILAR_IN_MODULE = 0.6
SIMILAR_IN_PACKAGE = 0.75
"""Similarity from which a template counts as a rewording of another, from 0 to 1."""

_ERROR = re.compile(r"(?:Error|Timeout|Refused|Full|Failed|Gone)$")
_FIELD = re.compile(r"\{\w*(?:![rsa])?(?::[^{}]*)?\}")
_PERCENT = re.compile(r"%(?:\(\w+\))?[-+#0]*\d*(?:\.\d+)?[sdrfgx]")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’]+")
_DULL = re.compile(
    r"an?|and|are|as|at|be|been|but|by|can|cannot|for|from|give|has|had|have|in|into|is|it|its|no|not"
    r"|of|on|one|or|so|that|the|their|them|there|these|they|this|those|to|was|were|which|with"
)
"""Words that name nothing: an identity leaves them out."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Sentence:
    """A sentence where the package writes it."""

    place: str
    """Room, file and function, joined by dots: `pods.hosts.check`. Folders between are left out."""
    template: str
    """Wording, with `{}` for each value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """Sentences by identity, and what a renewal changed."""

    sentences: dict[str, Sentence]
    """Sentence of each identity."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New identity of each sentence whose function has moved."""
    dropped: list[str] = field(default_factory=list)
    """Identities that the package has no longer."""


def sentence(identity: str, *figures: object) -> str:
    """Return a regular expression for the sentence, wherever a message has it.

    Each figure has to occur in the message too. Patterns
    can be joined by `+`: both are then asked for.
    """
    ahead = "".join(f"(?=.*?{_whole(str(figure))})" for figure in figures)
    return f"(?s:{ahead}(?=.*?{pattern(_template(identity))}))"


def says(text: object, identity: str, *figures: object) -> bool:
    """Return whether the text has the sentence and each of the figures."""
    return re.search(sentence(identity, *figures), str(text)) is not None


def pattern(template: str) -> str:
    """Return a regular expression for a template with any values."""
    first, *others = template.strip().split(HOLE)
    # The earliest place of each piece is enough: an atomic group (?>…) spares all others.
    return _literal(first) + "".join(f"(?>.*?{_literal(piece)})" for piece in others)


def load(path: Path = GOLDEN) -> dict[str, Sentence]:
    """Read the golden file."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        identity, _, template = line.partition(" = ")
        place = identity.rpartition(".")[0]
        found[identity] = Sentence(place=place, template=ast.literal_eval(template))
    return found


def collect(package: Path = PACKAGE) -> set[Sentence]:
    """Return every sentence of the package."""
    found: set[Sentence] = set()
    for path in sorted(package.rglob("*.py")):
        parts = [*path.relative_to(package).parent.parts]
        if path.stem != "__init__":
            parts.append(path.stem)
        module = ".".join([parts[0], *parts[1:][-1:]]) if parts else package.name
        found.update(sentences_of(path.read_text(encoding="utf-8"), module))
    return found


def sentences_of(source: str, module: str) -> Iterator[Sentence]:
    """Yield the sentences of a module."""
    yield from _Reader(module).read(ast.parse(source))


def update(old: Mapping[str, Sentence], now: Iterable[Sentence]) -> Catalogue:
    """Give each sentence its identity: that of the same or the most similar old one, or a new one.

    An old sentence of the same function comes first, then of the same module, then of any.
    """
    kept = _kept(old, set(now))
    left = set(now) - set(kept.values())

    # A sentence whose function moved keeps its words and gets the new place.
    sentences: dict[str, Sentence] = {}
    moved: list[str] = []
    for identity, sentence in kept.items():
        if identity.rpartition(".")[0] == sentence.place:
            sentences[identity] = sentence
        else:
            moved.append(identity)
    renamed: dict[str, str] = {}
    for identity in sorted(moved):
        words = identity.rpartition(".")[2]
        renamed[identity] = _free(f"{kept[identity].place}.{words}", sentences)
        sentences[renamed[identity]] = kept[identity]

    _name(left, sentences)
    return Catalogue(sentences=sentences, renamed=renamed, dropped=sorted(set(old) - set(kept)))


def _kept(old: Mapping[str, Sentence], now: set[Sentence]) -> dict[str, Sentence]:
    """Return the sentence of today for each old identity that has one."""
    # The same sentence at the same place, then the same sentence elsewhere.
    kept = {identity: sentence for identity, sentence in old.items() if sentence in now}
    left = now - set(kept.values())
    same = {sentence.template: sentence for sentence in sorted(left)}
    for identity, sentence in old.items():
        if identity not in kept and sentence.template in same:
            kept[identity] = same.pop(sentence.template)

    # Reworded sentences: the most similar pair first, within a function, a module and the package.
    for border, least in (
        (_function, SIMILAR_IN_FUNCTION),
        (_module, SIMILAR_IN_MODULE),
        (_anywhere, SIMILAR_IN_PACKAGE),
    ):
        left = now - set(kept.values())
        lost = {identity: sentence for identity, sentence in old.items() if identity not in kept}
        for identity, sentence in _alike(lost, left, border, least):
            if identity not in kept and sentence in left:
                kept[identity] = sentence
                left.discard(sentence)
    return kept


def _alike(
    lost: Mapping[str, Sentence],
    left: Iterable[Sentence],
    border: Callable[[Sentence], str],
    least: float,
) -> list[tuple[str, Sentence]]:
    """Return pairs of an identity and a sentence within the same border, the most similar first."""
    within: dict[str, list[Sentence]] = defaultdict(list)
    for sentence in left:
        within[border(sentence)].append(sentence)
    pairs = []
    for identity, before in lost.items():
        for after in within[border(before)]:
            likeness = _likeness(before.template, after.template, least)
            if likeness >= least:
                pairs.append((-likeness, identity, after))
    return [(identity, after) for _, identity, after in sorted(pairs)]


def dump(sentences: Mapping[str, Sentence]) -> str:
    """Return the text of a golden file."""
    return "".join(f"{key} = {sentences[key].template!r}\n" for key in sorted(sentences))


def main() -> None:
    """Renew the golden file, rename identities in the tests, and print what changed."""
    old = load() if GOLDEN.is_file() else {}
    new = update(old, collect())
    GOLDEN.write_text(dump(new.sentences), encoding="utf-8")
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        renewed = _renamed(text, new.renamed)
        if renewed != text:
            path.write_text(renewed, encoding="utf-8")
        for identity in new.dropped:
            if f'"{identity}"' in text:
                print(f"{path.relative_to(TESTS.parent)} names {identity}, which is gone")
    for before, after in sorted(new.renamed.items()):
        print(f"renamed: {before} -> {after}")
    for identity in new.dropped:
        print(f"dropped: {identity}")
    print(f"{len(new.sentences)} sentences in {GOLDEN.relative_to(TESTS.parent)}")


class _Reader:
    """Finds the sentences of a module, and knows in which function each stands."""

    def __init__(self, module: str) -> None:
        self.names = [module]
        self.found: list[Sentence] = []

    def read(self, tree: ast.Module) -> list[Sentence]:
        self._visit(tree, least=WORDS_OF_SENTENCE)
        return self.found

    def _visit(self, node: ast.AST, *, least: int) -> None:
        """Look for sentences of at least so many words in a node and below."""
        # A string that is a statement is a docstring.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        match node:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
                least = 1 if _ERROR.search(called) else least
        template = template_of(node)
        if template is not None:
            self._note(template, least)
            # Values have sentences of their own, such as the branches of a condition.
            for value in _values(node):
                self._visit(value, least=WORDS_OF_SENTENCE)
            return
        name = _named(node)
        if name is not None:
            self.names.append(name)
        for child in ast.iter_child_nodes(node):
            self._visit(child, least=_least(node, child, least))
        if name is not None:
            self.names.pop()

    def _note(self, template: str, least: int) -> None:
        words = _WORD.findall(template)
        spaced = " " in template.strip() or least == 1
        if len(words) >= least and spaced and _reads_as_prose(template):
            self.found.append(Sentence(place=self._place(), template=template))

    def _place(self) -> str:
        """Return the module and the function; the class stands for its methods with underscores."""
        module, *names = self.names
        named = [name for name in names if not name.startswith("__")]
        return ".".join([module, *named[-1:]])


def template_of(node: ast.AST) -> str | None:
    """Return the template of a string, an f-string or a sum of such; None of all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _FIELD.sub(HOLE, _PERCENT.sub(HOLE, node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left = template_of(node.left)
        right = template_of(node.right)
        if left is not None or right is not None:
            return (HOLE if left is None else left) + (HOLE if right is None else right)
    return None


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what fills the placeholders of a template."""
    if isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield part.value
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            if template_of(side) is None:
                yield side
            else:
                yield from _values(side)


def _least(node: ast.AST, child: ast.AST, least: int) -> int:
    """Return how many words a sentence has below a child: branches are as their condition is."""
    if isinstance(node, ast.Call) and child in node.args:
        return least
    if isinstance(node, ast.IfExp) and child is not node.test:
        return least
    return WORDS_OF_SENTENCE


def _named(node: ast.AST) -> str | None:
    """Return the name that a node adds to the place of what is below."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return None


def _reads_as_prose(template: str) -> bool:
    """Return whether a template is no program, page or query."""
    return not re.search(
        r"</?[a-z]+[ >/]|\bimport \w+\n|^#!|[{;]\n|\bSELECT \w|var\(--|white-space:|\)\n", template
    )


def _name(sentences: Iterable[Sentence], taken: dict[str, Sentence]) -> None:
    """Add new sentences to those with identities: place and first words tell them apart."""
    by_place: dict[str, list[Sentence]] = defaultdict(list)
    for sentence in sorted(sentences):
        by_place[sentence.place].append(sentence)
    for place, here in by_place.items():
        words = {sentence: _telling(sentence.template) for sentence in here}
        length = dict.fromkeys(here, 3)
        # Sentences that begin alike get more words.
        for _ in range(3):
            slugs = {sentence: "-".join(words[sentence][: length[sentence]]) for sentence in here}
            counts = Counter(slugs.values())
            for sentence in here:
                if counts[slugs[sentence]] > 1:
                    length[sentence] += 1
        for sentence in here:
            taken[_free(f"{place}.{slugs[sentence]}", taken)] = sentence


def _telling(template: str) -> list[str]:
    """Return the words of a template that say what it is about."""
    words = [word.lower().replace("'", "").replace("’", "") for word in _WORD.findall(template)]
    return [word for word in words if not _DULL.fullmatch(word)] or words


def _free(identity: str, taken: Mapping[str, Sentence]) -> str:
    """Return the identity, with a number behind where it is taken."""
    number = 2
    free = identity
    while free in taken:
        free = f"{identity}-{number}"
        number += 1
    return free


def _function(sentence: Sentence) -> str:
    return sentence.place


def _module(sentence: Sentence) -> str:
    """Return the room and the file."""
    return ".".join(sentence.place.split(".")[:2])


def _anywhere(_sentence: Sentence) -> str:
    return ""


def _likeness(before: str, after: str, least: float) -> float:
    """Return how similar the words of two templates are; 0 where surely below `least`."""
    matcher = difflib.SequenceMatcher(None, before.split(), after.split(), autojunk=False)
    if matcher.quick_ratio() < least:
        return 0.0
    return matcher.ratio()


def _literal(piece: str) -> str:
    """Return a regular expression for a piece of a sentence, however its lines are broken."""
    return re.sub(r"(?:\\?\s)+", r"\\s+", re.escape(piece))


def _renamed(text: str, renamed: Mapping[str, str]) -> str:
    for before, after in renamed.items():
        text = text.replace(f'"{before}"', f'"{after}"')
    return text


@functools.cache
def _golden() -> dict[str, str]:
    """Return the line's right side of each identity, unread."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" = ") for line in lines)
    return {identity: template for identity, _, template in pairs}


def _template(identity: str) -> str:
    golden = _golden()
    if identity not in golden:
        near = difflib.get_close_matches(identity, golden, n=3, cutoff=0.5)
        raise KeyError(
            f"{GOLDEN.name} has no sentence {identity!r}; near it: {', '.join(near) or 'none'}."
            f" Correct the name, or run `{COMMAND}` where the sentence is new."
        )
    template: str = ast.literal_eval(golden[identity])
    return template


def _whole(figure: str) -> str:
    """Return a regular expression for a figure as a whole: 2 is not found in 22."""
    before = r"(?<!\w)" if re.match(r"\w", figure) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", figure) else ""
    return before + re.escape(figure) + after


if __name__ == "__main__":
    main()
