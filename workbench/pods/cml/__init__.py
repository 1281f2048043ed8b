"""Workers of a Cloudera ML session."""
