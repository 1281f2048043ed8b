"""The task of rows with tables. General rows know no more of the task than this module."""

from __future__ import annotations

from workbench.finetune.data.sql.tables import SqlTable
from workbench.finetune.data.sql.task import WikiSql
from workbench.finetune.data.task import Task

Table = SqlTable
"""Table of the task."""

TASK: Task[Table] = WikiSql()
