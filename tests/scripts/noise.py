"""Output of programs at their worst: very many lines, very long ones, bars, raw bytes, events."""

import os
import random


def noise(rank: int) -> bytes:
    """Give all that a rank writes to its stdout."""
    rng = random.Random(rank)
    lines = b"".join(b"line %d of rank %d\n" % (n, rank) for n in range(100_000))
    event = b'@workbench {"time_s": 1.0, "rank": %d, "kind": "mark", "n": %%d}\n' % rank
    bars = b"".join(b"\r%3d%%|%s" % (n, b"#" * (n // 5)) for n in range(101)) + b"\n"
    long = b"x" * 1_000_000 + b"\n"
    raw = rng.randbytes(200_000) + b"\n\x1b[31mred\x1b[0m\n<img src=x onerror=alert(1)>\n"
    return (
        event % 0
        + lines
        + event % 1
        + bars
        + event % 2
        + long
        + event % 3
        + raw
        + event % 4
        + b"no newline at the end"
    )


if __name__ == "__main__":
    data = memoryview(noise(int(os.environ["RANK"])))
    while data:
        data = data[os.write(1, data) :]
    os.write(2, b"\r 10%\r 20%\xff\xfe")
