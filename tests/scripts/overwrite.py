"""Leave two files for the notebook, and the keeper's own records, as a hostile pod would."""

from __future__ import annotations

import os
from pathlib import Path

OWN = (
    *(
        "spec.json",
        "run.json",
        "state.json",
        "result.json",
        "events.jsonl",
        "hostfile",
        "command.sh",
        "origin.json",
    ),
    *(
        "prediction.json",
        "held.json",
        "manifest.json",
        "inputs/job.json",
        "inputs/script.zip",
        "card.html",
        "model",
    ),
    *(
        "logs/attempt-0/rank-0.stdout.log",
        "checkpoints/step-1/pod-0/rank-0/a",
        "files.txt",
        "profile.txt/a",
    ),
)

if os.environ["RANK"] == "0":
    out = Path(os.environ["WORKBENCH_RUN_DIR"], "out")
    for name in (*OWN, "files/mine.txt", "predictions.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(f"written by the pod: {name}")
    (out / "files" / "link").symlink_to("/etc/passwd")
