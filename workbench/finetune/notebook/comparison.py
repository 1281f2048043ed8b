"""`compare` as a notebook has it: runs over each other, or the FLOPS profiles of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from workbench.client import comparison as client
from workbench.client.comparison import AnyRun, RunComparison
from workbench.finetune.profile import compare as profiles
from workbench.finetune.profile.parse import Profile


@overload
def compare(
    one: Profile | None, other: Profile | None, *, names: Sequence[str] = ()
) -> profiles.ProfileComparison: ...
@overload
def compare(
    one: Sequence[AnyRun], other: None = None, *, names: Sequence[str] = ()
) -> RunComparison: ...
def compare(
    one: Sequence[AnyRun] | Profile | None,
    other: Profile | None = None,
    *,
    names: Sequence[str] = (),
) -> RunComparison | profiles.ProfileComparison:
    """Lay runs over each other: loss curves in one picture, options that differ, and what each came to.

    Nothing is started, and of a run directory nothing is read but its own files.

    Args:
        one: Runs in any state, in a list: directories, `Run`, `RunResult` or rows of `history`; or the `profile` of a
            result.
        other: With a profile, that of another run.
        names: What to call them. By default runs have the names that they were given, or of their directories;
            profiles are `a` and `b`.

    Raises:
        RunError: A directory is not that of a run, or a run has no FLOPS profile.
        ConfigError: There are fewer than two runs, or two of one name.
    """
    if one is None or isinstance(one, Profile):
        first, second = names or ("a", "b")
        return profiles.compare(one, other, names=(first, second))
    return client.compare(one, names=names)
