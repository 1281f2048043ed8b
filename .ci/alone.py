"""Run the few tests that failed beside others once more, alone. A second failure fails the check.

A test that passes alone has a race, in the test or in the package. The log names it, to be mended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
"""More failures are no chance."""
FAILED = 1  # what pytest answers if tests failed; anything else is an error of the session
LAST = Path(".pytest_cache/v/cache/lastfailed")


def main(code: int) -> int:
    """Return the exit code of the check, after a session of pytest that ended with `code`."""
    failed = sorted(json.loads(LAST.read_text())) if LAST.is_file() else []
    if code != FAILED or not 0 < len(failed) <= MOST:
        return code
    names = "\n".join(f"  {name}" for name in failed)
    print(f"\nFailed beside other tests, and run once more alone:\n{names}", flush=True)
    alone = subprocess.call([sys.executable, "-m", "pytest", "--nbmake", "-m", "", *failed])
    if alone == 0:
        print(
            f"\nFLAKY: failed beside other tests, passed alone. To be mended:\n{names}", flush=True
        )
    return alone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
