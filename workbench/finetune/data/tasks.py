"""The task of rows with tables. General rows know no more of the task than this module."""

from __future__ import annotations

from workbench.finetune.data.task import Task
from workbench.finetune.data.wikisql.tables import SqlTable
from workbench.finetune.data.wikisql.task import WikiSql

Table = SqlTable
"""Table of the task."""

TASK: Task[Table] = WikiSql()
