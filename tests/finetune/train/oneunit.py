"""DeepSpeed's ops for a disk from its sources, each compiled as one unit: a minute, not many."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
# Constants that several of the sources define for themselves.
OWN = ("c_library_name", "c_block_size", "c_io_queue_depth")


def compile_as_one_unit() -> None:
    """Have processes that are forked from this one compile and load the ops so."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    folder = REPOSITORY / "build" / "one-unit"  # its own: another checkout has other paths
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    for builder in (AsyncIOBuilder, PinMemoryBuilder):
        text, unit = _text_of(builder()), folder / f"{builder.NAME}_unit.cpp"
        if not unit.exists() or unit.read_text() != text:
            whole = unit.with_suffix(f".{os.getpid()}")  # another process may compile the file
            whole.write_text(text)
            whole.replace(unit)
        # Neither optimized nor with the headers of torch's C++ models: half of the compiler's CPU.
        flags = [flag for flag in builder().cxx_args() if flag not in ("-g", "-O3")]
        flags += ["-O0", "-DTORCH_INDUCTOR_CPP_WRAPPER"]
        builder.sources = lambda _, unit=unit: [str(unit)]
        builder.cxx_args = lambda _, flags=flags: list(flags)


def _text_of(builder: Any) -> str:
    places = [Path(builder.deepspeed_src_path(path)) for path in builder.include_paths()]
    seen: set[str] = set()

    def header(found: re.Match[str]) -> str:
        paths = [place / found[1] for place in places if (place / found[1]).exists()]
        if not paths:
            return found[0]  # of a library
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return inlined(paths[0])

    def inlined(path: Path) -> str:
        return re.sub(r'^#include ["<](.+)[">]', header, path.read_text(), flags=re.MULTILINE)

    sources = [Path(builder.deepspeed_src_path(path)) for path in builder.sources()]
    return "\n".join(
        "".join(f"#undef {name}\n#define {name} {name}_{number}\n" for name in OWN)
        + inlined(source)
        for number, source in enumerate(sources)
    )
