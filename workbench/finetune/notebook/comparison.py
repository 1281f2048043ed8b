"""`compare` for notebooks: compare runs, or the FLOPS profiles of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from workbench.client.tables import comparison as client
from workbench.client.tables.comparison import AnyRun, RunComparison
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
    """Compare runs: loss curves in a single picture, options that differ, and results.

    Nothing is started, and only the files of the run directories are read.

    Args:
        one: Runs in any state, in a list: directories, `Run`, `RunResult` or rows of `history`. Or
            the `profile` of a result.
        other: The profile of another run, if the first argument is a profile.
        names: Names to show. By default runs have their own names or the names of their
            directories; profiles are `a` and `b`.

    Raises:
        RunError: A directory is not a run directory, or a run has no FLOPS profile.
        ConfigError: There are fewer than two runs, or two runs of the same name.
    """
    if one is None or isinstance(one, Profile):
        first, second = names or ("a", "b")
        return profiles.compare(one, other, names=(first, second))
    return client.compare(one, names=names)
