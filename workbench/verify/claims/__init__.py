"""The claims, a file for every subject; `registry` has all rows."""
