"""WikiSQL as a task: questions about tables, answered by queries that can be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.base.errors import ConfigError
from workbench.finetune.data.lines import Fields
from workbench.finetune.data.task import Asked, Form, Task, Verdicts
from workbench.finetune.data.wikisql.query import Query, format_query, parse
from workbench.finetune.data.wikisql.rows import query_of, table_from
from workbench.finetune.data.wikisql.tables import SqlTable, execute


class WikiSql(Task[SqlTable]):
    prefix = "translate to SQL: "
    form = Form("question", "sql")
    fields = ("table_id", "table")

    def columns(self, row: Mapping[str, object]) -> Sequence[str]:
        if row.get("sql") is None:
            return ()
        return ("question", "sql", "table" if row.get("table") is not None else "table_id")

    def read(self, row: Fields, tables: Mapping[str, SqlTable] | None) -> Asked:
        question = row.text("question")
        query, table_id = query_of(row, tables)
        return Asked(self.prefix + question, format_query(query), table_id)

    def table(self, data: object, where: str) -> SqlTable:
        return table_from(data, where)

    def without_rows(self, table: SqlTable) -> SqlTable:
        """Return a table with its columns alone, which reading a row needs."""
        return replace(table, rows=())

    def judge(self, expected: str, predicted: str, table: SqlTable | None) -> Verdicts:
        """Compare two queries by their logic, and by their results on the table.

        Example:
            >>> select = "SELECT {} FROM table WHERE {}"
            >>> expected = select.format("a", "b = C AND d = 1")
            >>> WikiSql().judge(expected, select.format("A", "d = 1 AND b = c"), None)
            Verdicts(logical=True, execution=None)
        """
        wanted = parse(expected)
        answered = parse(predicted)
        if wanted is None:
            return Verdicts()
        logical = answered is not None and wanted.logical_form() == answered.logical_form()
        result = None if table is None else _same_result(wanted, answered, table)
        return Verdicts(logical, result)


def _same_result(wanted: Query, answered: Query | None, table: SqlTable) -> bool | None:
    try:
        right = execute(wanted, table)
    except ConfigError:
        return None
    if answered is None:
        return False
    try:
        given = execute(answered, table)
    except ConfigError:
        return False
    # Compare without order: SQL guarantees none.
    return Counter(given) == Counter(right)
