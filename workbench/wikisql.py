"""WikiSQL: rows of the small built-in dataset, tables, the parser and the results of queries."""

from __future__ import annotations

from workbench.finetune.data.sources.convert import read_tables
from workbench.finetune.data.wikisql.mini import mini_rows
from workbench.finetune.data.wikisql.query import parse as parse_sql
from workbench.finetune.data.wikisql.tables import execute as run_query

__all__ = [
    "mini_rows",
    "parse_sql",
    "read_tables",
    "run_query",
]
