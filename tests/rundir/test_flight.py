"""What torch's flight recorder and NCCL's own output say, by recorded texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.rundir.figures.flight import communication, flight_words, nccl_words
from workbench.rundir.paths import RunPaths

REFUSED = (
    "w0:71:90 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: "
    "Connect to 10.0.0.8<41571> failed : Connection refused\n"
)
NCCL = f"""\
w0:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
w0:71:71 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
w0:71:88 [0] NCCL INFO NET/IB : No device found.
w0:71:88 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
w0:71:88 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
w0:71:88 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
w0:71:88 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
{REFUSED}{REFUSED}step 7 loss 1.25
"""


def entry(
    number: int, *, name: str = "nccl:all_reduce", size: int = 5, done: bool = False, **more: Any
) -> dict[str, Any]:
    group = {"process_group": ["0", "default_pg"], "input_sizes": [[size]], "is_p2p": False}
    return {"collective_seq_id": number, "profiling_name": name, "retired": done, **group, **more}


def test_who_has_not_come_is_told_apart_from_who_waits() -> None:
    done = [entry(number, done=True) for number in (1, 2)]
    dumps = {
        0: {"entries": [*done, entry(3)]},
        1: {"entries": done},
        2: {"entries": [*done, entry(3)]},
    }
    assert flight_words(dumps) == [
        "collective 3 (nccl:all_reduce of [5]): ranks 0, 2 wait, rank 1 has not arrived"
    ]


def test_ranks_that_call_different_collectives_are_told() -> None:
    (words,) = flight_words(
        {0: {"entries": [entry(4)]}, 1: {"entries": [entry(4, name="nccl:broadcast", size=7)]}}
    )
    assert (
        words == "collective 4 is not the same: rank 0 "
        "nccl:all_reduce of [5], rank 1 nccl:broadcast of [7]"
    )


@pytest.mark.parametrize(
    "dump", [{}, {"entries": None}, {"entries": [{"collective_seq_id": "x"}, 3]}, {"entries": []}]
)
def test_a_dump_that_says_nothing_says_nothing(dump: dict[str, Any]) -> None:
    assert flight_words({0: dump}) == []
    assert flight_words({0: {"entries": [entry(1, done=True)]}}) == []


def test_what_nccl_printed_is_summed_up() -> None:
    assert nccl_words(NCCL.splitlines()) == [
        "NCCL version 2.27.3+cuda12.9",
        "NET/Socket : Using [0]eth0:10.0.0.7<0>",
        "2 channels via P2P/CUMEM, 1 channel via NET/Socket/0",
        "NCCL warns: socketStartConnect: Connect to 10.0.0.8<41571> failed : Connection refused",
    ]


def test_both_are_read_from_the_run_directory(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.rank_log(0, 0, "stdout").parent.mkdir(parents=True)
    paths.rank_log(0, 0, "stdout").write_text(NCCL)
    paths.flight(0).write_text(json.dumps({"entries": [entry(9)]}))
    paths.flight(1).write_text("not JSON")
    first, second, *_ = communication(paths)
    assert first == "collective 9 (nccl:all_reduce of [5]): rank 0 waits"
    assert second.startswith("NCCL version")
