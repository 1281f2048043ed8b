"""Patterns of a `.gitignore`, matched in a time that grows with the length of a path alone.

RE2 does the matching. Python's regular expressions take 24 times as long for each further star of a
pattern such as `*a*a*a*b`, which a stranger's folder may bring.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable


class IgnorePatterns:
    """Patterns in the order of their lines; the last match decides.

    Raises:
        ValueError: A line is not a pattern, or is too long for RE2.

    Example:
        >>> patterns = IgnorePatterns(["*.bin", "!keep.bin"])
        >>> patterns.decide("a.bin"), patterns.decide("keep.bin"), patterns.decide("a.py")
        (True, False, None)
    """

    def __init__(self, lines: Iterable[str]) -> None:
        from pathspec import GitIgnoreSpec  # only jobs with a folder need the library

        with warnings.catch_warnings():
            # Python compiles each pattern as well, and warns of "[[".
            warnings.simplefilter("ignore", FutureWarning)
            patterns = [_of_unicode(line) for line in lines]
            try:
                self._spec = GitIgnoreSpec.from_lines(patterns, backend="re2")
            except ValueError:
                raise
            except Exception as error:  # re2.error is no ValueError
                raise ValueError(f"the pattern is too long ({error})") from error

    def decide(self, path: str) -> bool | None:
        """Return whether a path is taken or taken back by the last match. None: no match.

        A path is relative, with `/` between its parts; a folder's ends with `/`.
        """
        return self._spec.check_file(_of_unicode(path)).include


def _of_unicode(text: str) -> str:
    """Replace the parts of a name without UTF-8: RE2 takes UTF-8 alone."""
    return text.encode(errors="surrogatepass").decode(errors="replace")
