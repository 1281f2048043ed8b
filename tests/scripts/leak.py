"""Print every secret that it was given or knows, in several ways, and fail with them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

given = [value for name, value in sorted(os.environ.items()) if name[:4] in ("JOB_", "POD_")]
own = [text[::-1] for text in json.loads(os.environ["BACKWARDS"])]  # nobody else has seen these
for value in [*given, *own, *sys.argv[1:]]:
    print("found", value, flush=True)
    sys.stderr.write(f"\r half drawn {value}")
    sys.stderr.flush()
    os.write(1, f"in two writes {value[:7]}".encode())
    os.write(1, f"{value[7:]}\n".encode())
print(dict(os.environ), json.dumps({"args": sys.argv}), flush=True)
sys.stderr.write("\n")
for value in [*given, *own, *sys.argv[1:]]:
    print(
        f'@workbench {{"time_s": 1.5, "rank": 0, "kind": "mine", "text": {json.dumps(value)}}}',
        flush=True,
    )
# Both ranks have printed all before one fails: that ends the other.
rank_folder = Path(os.environ["WORKBENCH_RANK_DIR"])
meeting = rank_folder.parents[3] / f"printed-{rank_folder.parent.name}"
meeting.mkdir(exist_ok=True)
(meeting / rank_folder.name).touch()
while len(list(meeting.iterdir())) < 2:
    time.sleep(0.01)
raise RuntimeError("cannot log in with " + " ".join([*given, *own]))
