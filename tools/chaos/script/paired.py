"""A training script without torch: numbered lines and events, and each rank's own record of them.

The record tells every start of a rank and every printed line apart by the attempt, so that a run
that was trained twice, and a line or an event that came twice, can be counted.
"""

import json
import os
import time
from pathlib import Path

witness = Path(os.environ["PAIRED_WITNESS"])
lines = int(os.environ["PAIRED_LINES"])
rank = os.environ["RANK"]
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

with (witness / "starts").open("a") as starts:
    starts.write(f"{attempt} {rank}\n")
count = os.open(witness / f"try-{attempt}-rank-{rank}.count", os.O_WRONLY | os.O_CREAT)
for n in range(lines):
    print(f"try {attempt} rank {rank} line {n}", flush=True)
    beat = {
        "time_s": time.time(),
        "rank": int(rank),
        "kind": "beat",
        "of": rank,
        "attempt": attempt,
        "n": n,
    }
    print("@workbench " + json.dumps(beat), flush=True)
    os.pwrite(count, b"%8d" % (n + 1), 0)
    time.sleep(0.04)
(witness / f"try-{attempt}-rank-{rank}.whole").touch()
