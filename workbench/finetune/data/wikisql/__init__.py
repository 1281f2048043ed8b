"""WikiSQL: its queries, tables, rows and datasets, and how its answers are judged."""
