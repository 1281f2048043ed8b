"""Write a Python cell that starts a cluster and submits a job."""

from __future__ import annotations

import json
from collections.abc import Mapping

Options = Mapping[str, object]


def start_code(place: str, place_options: Options, pods: Options, options: Options) -> str:
    """Return the lines that start a cluster and submit `job`; see `submit_code` for the rest."""
    parts = ["backend", f"PodSpec({arguments(pods)})"]
    if options:
        parts.append(arguments(options))
    cluster = f"Cluster({', '.join(parts)})"
    return f"backend = {place}({arguments(place_options)})\n{submit_code(cluster)}"


def submit_code(cluster: str) -> str:
    """Return the lines that submit `job` to a cluster, show the run and wait for its end."""
    return (
        f"with {cluster} as cluster:\n"
        "    run = cluster.submit(job)\n"
        "    display(run)\n"
        "    result = run.wait()\n"
        "result\n"
    )


def call_lines(name: str, options: Options) -> str:
    """Return a call with an option per line."""
    lines = [f"    {option}={literal(value)},\n" for option, value in options.items()]
    return f"{name}(\n{''.join(lines)})" if lines else f"{name}()"


def arguments(options: Options) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in options.items())


def literal(value: object) -> str:
    r"""Return a value as Python source, with escapes for letters that hide or turn others.

    Example:
        >>> print(literal({"path": 'a "b"', "steps": 30.0, "rows": (1, None)}))
        {"path": "a \"b\"", "steps": 30, "rows": [1, None]}
        >>> print(literal("é\u202e"))
        "é\u202e"
    """
    match value:
        case str():  # JSON's form of a string is valid Python, with this project's quotes
            quoted = json.dumps(value, ensure_ascii=False)
            shown = [part if part.isprintable() else ascii(part)[1:-1] for part in quoted]
            return "".join(shown)
        case float() if value.is_integer() and abs(value) < 1e6:
            return str(int(value))
        case Mapping():
            pairs = [f"{literal(key)}: {literal(part)}" for key, part in value.items()]
            return f"{{{', '.join(pairs)}}}"
        case list() | tuple():
            parts = [literal(part) for part in value]
            return f"[{', '.join(parts)}]"
    return repr(value)
