"""Summarise the collectives of a run from torch's flight recorder and NCCL logs.

Only the logs are read. The recorder's JSON is torch's own:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.files import open_record, read_json
from workbench.base.json_values import Json, items, parts, text, whole
from workbench.base.words import counted, short_list
from workbench.rundir.paths import RunPaths

_MOST_BYTES = 4 << 20  # of a rank's log
_MOST_LINES = 12
_LONGEST_LINE = 2000  # characters
_VERSION = re.compile(r"NCCL version \S{1,80}")
_NCCL = re.compile(r"NCCL (INFO|WARN)\s{1,20}(.*)")
_NETWORK = re.compile(r"(NET/\w{1,40}\s{0,4}: Using .*)")
_VIA = re.compile(
    r"Channel \S{1,20}\s{0,4}:\s{0,4}\S{1,40}+ -> \S{1,40}(?: .{0,80})? via (\S{1,80})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Last:
    """Last collective of a process group that a rank began."""

    number: int
    words: str
    done: bool


def flight_words(dumps: Mapping[int, Json]) -> list[str]:
    """Compare the ranks' records: find ranks that are missing from a collective or run another.

    Example:
        >>> entry = {"collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"]}
        >>> behind = {**entry, "collective_seq_id": 6, "retired": True}
        >>> flight_words({0: {"entries": [behind, entry]}, 1: {"entries": [behind]}})
        ['collective 7 (nccl:all_reduce): rank 0 waits, rank 1 has not arrived']
    """
    groups: dict[str, dict[int, _Last]] = {}
    for rank, dump in sorted(dumps.items()):
        for group, last in _last_of_groups(dump).items():
            groups.setdefault(group, {})[rank] = last
    return [words for _, ranks in sorted(groups.items()) for words in _stuck(ranks)]


def _last_of_groups(dump: Json) -> dict[str, _Last]:
    last: dict[str, _Last] = {}
    for entry in parts(dump.get("entries")):
        number = whole(entry.get("collective_seq_id"))
        group = " ".join(map(str, items(entry.get("process_group"))))
        if (
            number is None
            or entry.get("is_p2p") is True
            or (group in last and last[group].number >= number)
        ):
            continue
        sizes = " ".join(str(size) for size in items(entry.get("input_sizes")))
        words = " of ".join(filter(None, (text(entry.get("profiling_name")), sizes)))
        done = entry.get("retired") is True or entry.get("state") == "completed"
        last[group] = _Last(number=number, words=words, done=done)
    return last


def _stuck(ranks: Mapping[int, _Last]) -> Iterator[str]:
    number = max(last.number for last in ranks.values())
    there = {rank: last for rank, last in ranks.items() if last.number == number}
    behind = [rank for rank in ranks if rank not in there]
    waiting = [rank for rank, last in there.items() if not last.done]
    if not waiting:
        return
    kinds: dict[str, list[int]] = {}
    for rank, last in there.items():
        kinds.setdefault(last.words, []).append(rank)
    if len(kinds) > 1:
        yield f"collective {number} is not the same: " + ", ".join(
            f"{_ranks(who)} {w}" for w, who in kinds.items()
        )
        return
    rest = (
        f", {_ranks(behind)} {'has' if len(behind) == 1 else 'have'} not arrived" if behind else ""
    )
    yield f"collective {number} ({there[waiting[0]].words}): {_ranks(waiting)} " + (
        f"{'waits' if len(waiting) == 1 else 'wait'}{rest}"
    )


def nccl_words(lines: Iterable[str]) -> list[str]:
    """Summarise NCCL_DEBUG=INFO or WARN output: version, networks, links between GPUs, warnings.

    Example:
        >>> nccl_words(["w0:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>", "NCCL version 2.27.3+cuda12.9"])
        ['NCCL version 2.27.3+cuda12.9', 'NET/Socket : Using [0]eth0:10.0.0.1<0>']
    """
    facts: dict[str, None] = {}
    warnings: dict[str, None] = {}
    ways: Counter[str] = Counter()
    for line in (each[:_LONGEST_LINE] for each in lines):
        if version := _VERSION.search(line):
            facts = {version[0]: None, **facts}
            continue
        if not (match := _NCCL.search(line)):
            continue
        kind = match[1]
        rest = match[2].strip()
        if kind == "WARN":
            warnings[f"NCCL warns: {rest}"] = None
        elif network := _NETWORK.search(rest):
            facts[network[1]] = None
        elif way := _VIA.search(rest):
            ways[way[1]] += 1
    via = [f"{counted(number, 'channel')} via {way}" for way, number in ways.most_common()]
    return [*facts, *([", ".join(via)] if via else []), *warnings][:_MOST_LINES]


def communication(paths: RunPaths) -> list[str]:
    dumps = {rank: read_json(path, within=paths.root) for rank, path in flights(paths)}
    return [
        *flight_words({rank: dump for rank, dump in dumps.items() if dump}),
        *nccl_words(_printed(paths)),
    ]


def flights(paths: RunPaths) -> Sequence[tuple[int, Path]]:
    """Return the copied dumps of the recorder, by rank."""
    named = (
        (path.stem.partition("-")[2], path) for path in sorted(paths.logs.glob("flight-*.json"))
    )
    return [(int(rank), path) for rank, path in named if rank.isdigit()]


def _printed(paths: RunPaths) -> Iterator[str]:
    for path in sorted(paths.logs.glob("rank-*.std*.log")):
        # `open_record` refuses a link in place of the log.
        with contextlib.suppress(OSError), open_record(path) as log:
            for line in log.read(_MOST_BYTES).decode(errors="replace").splitlines():
                if "NCCL" in line:
                    yield line


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + short_list([str(rank) for rank in ranks])
