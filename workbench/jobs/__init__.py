"""Any kind of job: the protocol, the registry of kinds, scripts and functions.

Nothing is started here.
"""
