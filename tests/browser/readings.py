"""The neutral text of a picture: what a person reads in it, without what differs between two runs.

A record of docs/pictures/texts.json holds the text of a picture beside the hash of its file.
Numbers, times, sizes and names of runs are `#`. A line that was read before is left out, so that
a table of two rows reads like a table of eight.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
RECORDS = PICTURES / "texts.json"
Texts = Mapping[str, Mapping[str, list[str]]]
"""Neutral lines by picture, and by part of the picture."""
Records = Mapping[str, Mapping[str, Any]]
"""`sha256` and `texts` by picture."""
# What is present in some moments or runs only: hints of a silent rank, a bar's state of the start.
LEFT_OUT = (
    ".wb-hint",
    ".wb-card .wb-quiet",  # what became of the ranks that did not fail first
    "[data-state='running'] > .dw-message",
    ".dw-note",
    "input[type=checkbox]",
    "style",
    "script",
)

# The lines of an element as they are read, with the chosen values of its fields.
READ = """(root, [leftOut, lastBefore]) => {
    const lines = [];
    let last = null;
    const add = (text, holder) => {
        let block = holder;
        while (getComputedStyle(block).display.startsWith("inline")) block = block.parentElement;
        text.split(/\\n/).forEach((line, number) => {
            const words = line.replace(/\\s+/g, " ").trim();
            if (!words) return;
            if (block === last && !number) lines.push(`${lines.pop()} ${words}`);
            else lines.push(words);
            last = block;
        });
    };
    const isInSight = element => {
        const {height, top} = element.getBoundingClientRect();
        return height > 1 && top < element.ownerDocument.defaultView.innerHeight;
    };
    const visit = node => {
        if (node.nodeType === Node.TEXT_NODE) {
            if (node.data.trim() && isInSight(node.parentElement))
                add(node.data, node.parentElement);
            return;
        }
        if (node.nodeType !== Node.ELEMENT_NODE || node.matches(leftOut)) return;
        if (!node.checkVisibility({visibilityProperty: true, opacityProperty: true})) return;
        if (node.matches("iframe")) visit(node.contentDocument.body);
        else if (node.matches("select")) add(node.selectedOptions[0]?.text ?? "", node);
        else if (node.matches("input")) add(node.value || node.placeholder, node);
        else node.childNodes.forEach(visit);
    };
    visit(root);
    const end = lines.findIndex(line => lastBefore && line.startsWith(lastBefore));
    return end < 0 ? lines : lines.slice(0, end);
}"""

_RULES = (
    # The name of a script's folder on a pod.
    (r"(/script/)[^/\"]+/(?=\w+\.py)", r"\1"),
    # Names of runs; numbers, but not the digits of a name such as zero1; sizes and durations.
    (r"\b\d{8}-\d{6}-[\w-]+", "#"),
    (r"-[0-9a-f]{6}\b", "-#"),
    (r"(?<![A-Za-z\d_])\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?", "#"),
    (r"# (?:[KMG]i?B(?:/s)?|%|min|ms|µs|h|s|bytes)(?!\w)", "#"),
    (r"#(?:(?:, | → | | / |-)#)+", "#"),
    (r"# (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) #", "# MONTH #"),
    (r"^★ #$", "#"),
    (r"Each point is the mean of # logged steps\.", ""),  # of long runs
    (r"memory per pod, GiB", "memory per pod"),  # only above a plot
    # One of a thing, or several.
    (r"# (pod|rank|row|run)s\b", r"# \1"),
    (r"pod-#(?:, pod-#)+", "pod-#"),
    (r"row # over row #(?:; row # over row #)+", "row # over row #"),
)
_TECHNIQUES = r"\b(?:single|ddp|zero[123](?:-offload)?|fsdp|local-sgd)\b"


def neutral(lines: Iterable[str], *, techniques: bool = True) -> list[str]:
    """Make lines neutral; without `techniques`, their names are neutral too.

    The width of the numbers decides whether a column has room or is named by the fold, so each name
    of the fold is a line, as in the head of a table.
    """
    kept = []
    for line in (each for whole in lines for each in whole.split(" · ")):
        for pattern, word in _RULES:
            line = re.sub(pattern, word, line)
        if not techniques:
            line = re.sub(_TECHNIQUES, "TECHNIQUE", line)
        if line:
            kept.append(line)
    return list(dict.fromkeys(kept))


def load_records() -> Records:
    """Read the records, by the names of the pictures."""
    records: Records = json.loads(RECORDS.read_text())
    return records


def write_records(texts: Texts) -> None:
    """Record the texts of pictures beside the hashes of their files."""
    records = {}
    for name in sorted(texts):
        records[name] = {"sha256": digest(PICTURES / name, texts[name]), "texts": texts[name]}
    RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def digest(picture: Path, texts: Mapping[str, list[str]]) -> str:
    """The SHA-256 of a picture's file and its texts, so that neither is changed alone."""
    return hashlib.sha256(picture.read_bytes() + json.dumps(texts).encode()).hexdigest()


def differences(recorded: Records, texts: Texts) -> list[str]:
    """The lines that differ from the records, in any order, a patch for each part of a picture."""
    found = []
    for picture, record in recorded.items():
        for part, lines in record["texts"].items():
            read = texts[picture][part]
            names = (f"{picture}, {part}: recorded", f"{picture}, {part}: read now")
            found += difflib.unified_diff(sorted(lines), sorted(read), *names, n=0, lineterm="")
    return found
