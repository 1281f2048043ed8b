"""Read what ranks wrote, by offset and with a cap, so that no amount of output slows the agent or fills its memory."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.worker.agent.message import Message, whole_in
from workbench.worker.agent.ranks.order import OutputOrder
from workbench.worker.agent.ranks.output import OutputStream

Chunk = dict[str, object]
Readable = OutputStream | OutputOrder


def read_chunks(streams: Mapping[str, Readable], offsets: Message, max_bytes: int) -> dict[str, Chunk]:
    starts = {name: whole_in(offsets, name, 0) for name in streams}
    fresh = {name: start for name, start in starts.items() if streams[name].size > start}
    chunks: dict[str, Chunk] = {}
    left = max_bytes
    # The smallest first: whatever they leave of their share is there for the rest.
    for index, name in enumerate(sorted(fresh, key=lambda n: streams[n].size - fresh[n])):
        data = streams[name].read(fresh[name], left // (len(fresh) - index))
        left -= len(data)
        if data:
            chunks[name] = {"offset": fresh[name], "data": data.decode("latin-1")}
    return chunks
