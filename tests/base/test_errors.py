"""Errors that name the nearest allowed value, and keep long foreign values short."""

from __future__ import annotations

import pytest

from workbench.base.errors import (
    ConfigError,
    DiskFull,
    RunFailed,
    one_of,
    require_package,
    shortened,
    suggests,
)


@pytest.mark.parametrize(
    ("got", "hint"),
    [
        ("Zero-1", "did you mean 'zero1'?"),
        ("('FSDP')", "did you mean 'FSDP'?"),
        ("x" * 5000, "is not known. Allowed: single, zero1, FSDP"),
        ("", "is not known. Allowed"),
        (3, "3 is not known. Allowed"),
    ],
)
def test_the_nearest_allowed_value_is_named(got: object, hint: str) -> None:
    text = str(one_of("technique", got, ["", "single", "zero1", "FSDP"]))
    assert text.startswith("technique ") and hint in text
    assert text.endswith("Allowed: single, zero1, FSDP") and len(text) < 400


def test_only_a_long_value_is_shortened() -> None:
    longest = next(n for n in range(10_000) if shortened("x" * n) != repr("x" * n)) - 1
    assert shortened("x" * longest) == repr("x" * longest)
    text = shortened("x" * (longest + 1))
    assert text.endswith("…") and len(text) == len(repr("x" * longest)) + 1


def test_a_function_refuses_an_unknown_option_with_the_nearest_name() -> None:
    @suggests("measure")
    def measure(self: str, *, pods: int = 1) -> tuple[str, int]:
        return self, pods

    assert measure("a", pods=3) == ("a", 3)
    with pytest.raises(ConfigError, match="measure option 'pod' is not known: did you mean 'pods'"):
        measure("a", pod=3)  # type: ignore[call-arg]


def test_a_missing_package_is_named_with_its_extra() -> None:
    require_package("json", "reading", extra="files")
    with pytest.raises(ConfigError, match=r"reading needs no_such_thing, .* extra 'files'"):
        require_package("no_such_thing", "reading", extra="files")


def test_errors_keep_their_words_and_their_result() -> None:
    assert str(DiskFull(28, "no room on pod-0")) == "no room on pod-0"
    assert RunFailed("it failed", result=3).result == 3
