"""Objects as YAML that a person can read: in their own order, texts of several lines as such, no anchors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def yaml_of(data: Mapping[str, object]) -> str:
    r"""Return the YAML of plain JSON.

    Example:
        >>> print(yaml_of({"b": 1, "a": "x\ny\n"}), end="")
        b: 1
        a: |
          x
          y
    """
    import yaml  # it comes with transformers

    # Packed files are long, and the emitter in C is ten times as fast.
    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        def ignore_aliases(self, _data: Any) -> bool:
            return True  # what appears twice is written twice

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, width=110))
