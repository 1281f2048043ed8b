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

from workbench.base.files import read_json, records
from workbench.base.json_values import Json, as_int, as_list, as_objects, as_str
from workbench.base.words import pluralize, short_list
from workbench.rundir.output.attempts import last_logs, open_log
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
        >>> group = {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"]}
        >>> entry = {**group, "collective_seq_id": 7}
        >>> behind = {**group, "collective_seq_id": 6, "retired": True}
        >>> flight_words({0: {"entries": [behind, entry]}, 1: {"entries": [behind]}})
        ['collective 7 (nccl:all_reduce): rank 0 waits, rank 1 has not arrived']
    """
    groups: dict[str, dict[int, _Last]] = {}
    for rank, dump in sorted(dumps.items()):
        last_of_groups = _last_of_groups(dump)
        for group, last in last_of_groups.items():
            groups.setdefault(group, {})[rank] = last
    stuck: list[str] = []
    for _, ranks in sorted(groups.items()):
        stuck += _stuck(ranks)
    return stuck


def _last_of_groups(dump: Json) -> dict[str, _Last]:
    last: dict[str, _Last] = {}
    for entry in as_objects(dump.get("entries")):
        number = as_int(entry.get("collective_seq_id"))
        group_names = as_list(entry.get("process_group"))
        group = " ".join(str(name) for name in group_names)
        is_p2p = entry.get("is_p2p") is True
        if number is None or is_p2p:
            continue
        before = last.get(group)
        if before is not None and before.number >= number:
            continue
        name = as_str(entry.get("profiling_name"))
        input_sizes = as_list(entry.get("input_sizes"))
        sizes = " ".join(str(size) for size in input_sizes)
        words = name or sizes
        if name and sizes:
            words = f"{name} of {sizes}"
        is_retired = entry.get("retired") is True
        done = is_retired or entry.get("state") == "completed"
        last[group] = _Last(number=number, words=words, done=done)
    return last


def _stuck(ranks: Mapping[int, _Last]) -> Iterator[str]:
    number = max(last.number for last in ranks.values())
    there: dict[int, _Last] = {}
    behind: list[int] = []
    for rank, last in ranks.items():
        if last.number == number:
            there[rank] = last
        else:
            behind.append(rank)
    waiting = [rank for rank, last in there.items() if not last.done]
    if not waiting:
        return
    kinds: dict[str, list[int]] = {}
    for rank, last in there.items():
        kinds.setdefault(last.words, []).append(rank)
    if len(kinds) > 1:
        clauses = [f"{_ranks(who)} {words}" for words, who in kinds.items()]
        differing = ", ".join(clauses)
        yield f"collective {number} is not the same: {differing}"
        return
    rest = ""
    if behind:
        has = "has" if len(behind) == 1 else "have"
        rest = f", {_ranks(behind)} {has} not arrived"
    name = there[waiting[0]].words
    wait = "waits" if len(waiting) == 1 else "wait"
    yield f"collective {number} ({name}): {_ranks(waiting)} {wait}{rest}"


def nccl_words(lines: Iterable[str]) -> list[str]:
    """Summarise NCCL_DEBUG=INFO or WARN output: version, networks, links between GPUs, warnings.

    Example:
        >>> network = "w0:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>"
        >>> nccl_words([network, "NCCL version 2.27.3+cuda12.9"])
        ['NCCL version 2.27.3+cuda12.9', 'NET/Socket : Using [0]eth0:10.0.0.1<0>']
    """
    facts: dict[str, None] = {}
    warnings: dict[str, None] = {}
    ways: Counter[str] = Counter()
    for long_line in lines:
        line = long_line[:_LONGEST_LINE]
        version = _VERSION.search(line)
        if version:
            # The version stands first.
            facts = {version[0]: None, **facts}
            continue
        match = _NCCL.search(line)
        if not match:
            continue
        # Warnings, the network in use, and the ways between ranks; other lines tell users nothing.
        kind = match[1]
        rest = match[2].strip()
        network = _NETWORK.search(rest)
        way = _VIA.search(rest)
        if kind == "WARN":
            warnings[f"NCCL warns: {rest}"] = None
        elif network:
            facts[network[1]] = None
        elif way:
            ways[way[1]] += 1
    summary = list(facts)
    if ways:
        via = []
        for name, number in ways.most_common():
            via.append(f"{pluralize(number, 'channel')} via {name}")
        summary.append(", ".join(via))
    summary.extend(warnings)
    return summary[:_MOST_LINES]


def communication(paths: RunPaths) -> list[str]:
    dumps = {}
    for rank, path in flights(paths):
        dump = read_json(path)
        if dump:
            dumps[rank] = dump
    of_recorder = flight_words(dumps)
    of_nccl = nccl_words(_printed(paths))
    return of_recorder + of_nccl


def flights(paths: RunPaths) -> Sequence[tuple[int, Path]]:
    """Return the copied dumps of the recorder, by rank."""
    dumps = []
    for path in records.try_files(paths.logs, "flight-*.json"):
        rank = path.stem.removeprefix("flight-")
        if rank.isdigit():
            dumps.append((int(rank), path))
    return dumps


def _printed(paths: RunPaths) -> Iterator[str]:
    for _, path in last_logs(paths, "std*"):
        # `open_log` refuses a link in place of the log.
        with contextlib.suppress(OSError), open_log(path) as log:
            printed = log.read(_MOST_BYTES).decode(errors="replace")
            for line in printed.splitlines():
                if "NCCL" in line:
                    yield line


def _ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {short_list(ranks)}"
