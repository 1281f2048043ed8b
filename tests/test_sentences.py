"""Words of messages that tests quote: how they match, and that the package has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.sentences import HOLE, says, sentence, templates

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "workbench"

SOURCE = """
def check(self, name):
    if not name:
        raise ConfigError("gone")
    raise ConfigError(f"{name} has {len(word)} slots, "
        + "and two are needed" + name)
"""


def test_tests_quote_words_that_the_package_has() -> None:
    """Check the slow tests too, which few runs reach."""
    strings = {
        " ".join(template.split())
        for path in sorted(PACKAGE.rglob("*.py"))
        for template in templates(path.read_text(encoding="utf-8"))
    }
    text = "\n".join(strings)
    unknown = []
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        # Parsing all tests takes seconds; most quote no message.
        if path.name == Path(__file__).name or "tests.support.sentences" not in source:
            continue
        for words in quoted_in(source):
            plain = " ".join(words.split())
            if plain in text or any(re.search(sentence(plain), string) for string in strings):
                continue
            unknown.append(f"{path.name}: {words}")
    assert unknown == [], "these words are in no string of the package: quote the message anew"


def quoted_in(source: str) -> Iterator[str]:
    """Yield what a test gives as the first argument of `sentence`, or the second of `says`."""
    places = {"sentence": 0, "says": 1}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = places.get(node.func.id)
            # A variable holds words of a table, which its test compares with the package.
            if place is not None and isinstance(node.args[place], ast.Constant):
                yield ast.literal_eval(node.args[place])


def test_a_template_has_a_hole_for_each_value() -> None:
    found = list(templates(SOURCE))
    assert "gone" in found
    assert "{} has {} slots, and two are needed{}" in found


def test_words_and_each_figure_are_asked_for() -> None:
    words = f"has {HOLE} slots, and {HOLE} are needed"
    message = "pod-1 has 2 slots, and 22 are needed"
    assert says(f"before: {message}", words, 2, 22)
    assert re.search("before: " + sentence(words, 2), f"before: {message}")
    assert not says(message, words, 3)
    assert not says(message.replace("22", "222"), words, 22)
    assert not says(message, "are needed on")


def test_words_take_any_value_and_any_break_of_a_line() -> None:
    assert says("x is (not)\n  here: a.b.", "{} is (not) here: {}.")
    assert not says("x is not here: a.b.", "{} is (not) here: {}.")
