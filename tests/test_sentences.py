"""The catalogue of sentences: what it finds, how identities stay, and that its file is current."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sentences import (
    COMMAND,
    Sentence,
    collect,
    dump,
    load,
    pattern,
    says,
    sentence,
    sentences_of,
    update,
)

IDENTITY = "finetune.refusals.check_at_submit.max-memory-names"
SOURCE = '''
"""Docstring of three words or more."""


class Host:
    def check(self, name):
        """Another docstring of the same kind."""
        if not name:
            raise ConfigError("gone")
        word = "gone"
        raise ConfigError(f"{name} has {len(word)} slots, "
            f"and {'two are needed here' if word else ''}"
            + "; name another")
'''


def test_file_has_the_sentences_of_the_package() -> None:
    golden = set(load().values())
    now = collect()
    gone = [sentence.template for sentence in sorted(golden - now)]
    new = [sentence.template for sentence in sorted(now - golden)]
    assert (gone, new) == ([], []), f"run `{COMMAND}`; the diff of its file shows what users read"


def test_tests_name_sentences_that_there_are() -> None:
    """Check the slow tests too, which few runs reach."""
    golden = load()
    unknown = []
    for path in Path(__file__).parent.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        # Parsing all tests takes seconds; most quote no sentence.
        if path.name == Path(__file__).name or "tests.support.sentences" not in text:
            continue
        unknown += [f"{path.name}: {name}" for name in identities_in(text) if name not in golden]
    assert unknown == []


def identities_in(source: str) -> Iterator[str]:
    """Yield what a test gives as the first argument of `sentence`, or the second of `says`."""
    places = {"sentence": 0, "says": 1}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = places.get(node.func.id)
            if place is not None:
                yield ast.literal_eval(node.args[place])


def test_messages_of_errors_and_longer_strings_are_sentences() -> None:
    found = [(sentence.place, sentence.template) for sentence in sentences_of(SOURCE, "pods")]
    assert found == [
        ("pods.check", "gone"),
        ("pods.check", "{} has {} slots, and {}; name another"),
        ("pods.check", "two are needed here"),
    ]


def written(template: str, place: str = "pods.hosts.check") -> Sentence:
    return Sentence(place=place, template=template)


def test_a_reworded_sentence_keeps_its_identity() -> None:
    slots = written("{} has {} slots")
    old = update({}, [written("{} has no sshd, or sshd is not started"), slots]).sentences
    assert list(old) == ["pods.hosts.check.sshd-sshd-started", "pods.hosts.check.slots"]
    new = update(old, [written("no sshd is started on {}"), slots, written("new")])
    assert new.sentences == {
        "pods.hosts.check.sshd-sshd-started": written("no sshd is started on {}"),
        "pods.hosts.check.slots": slots,
        "pods.hosts.check.new": written("new"),
    }
    assert (new.renamed, new.dropped) == ({}, [])


def test_a_sentence_that_moves_is_renamed_and_one_that_is_gone_is_dropped() -> None:
    old = update({}, [written("{} has {} slots"), written("nothing of the kind")]).sentences
    new = update(old, [written("{} has {} slots", "pods.fleet.check")])
    assert new.renamed == {"pods.hosts.check.slots": "pods.fleet.check.slots"}
    assert new.dropped == ["pods.hosts.check.nothing-kind"]


def test_sentences_survive_the_file(tmp_path: Path) -> None:
    sentences = update({}, [written("a 'b' \"c\"\n{} = d\t… \x1b[0m")]).sentences
    file = tmp_path / "sentences.txt"
    file.write_text(dump(sentences), encoding="utf-8")
    assert load(file) == sentences


def test_a_sentence_asks_for_the_sentence_and_each_figure() -> None:
    message = load()[IDENTITY].template.format(2, 22, 2)
    assert says(f"before: {message}", IDENTITY, 2, 22)
    assert re.search("before: " + sentence(IDENTITY, 2), f"before: {message}")
    assert not says(message, IDENTITY, 3)
    assert not says(message.replace("22", "222"), IDENTITY, 22)
    assert not says(message[5:], IDENTITY)
    assert not says("max_memory", IDENTITY)


def test_patterns_take_any_value_and_any_break_of_a_line() -> None:
    assert re.search(f"(?s){pattern('{} is (not) here: {}.')}", "x is (not)\n  here: a.b.")
    assert not re.search(pattern("{} is (not) here: {}."), "x is not here: a.b.")


def test_an_unknown_identity_names_the_nearest() -> None:
    with pytest.raises(KeyError, match=re.escape(IDENTITY)):
        sentence(IDENTITY[:-1])
