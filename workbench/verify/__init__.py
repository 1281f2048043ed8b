"""`workbench verify`: try every claim that depends on the machine, and print one table.

Uses the public names of the package, as a user's script does.
"""
