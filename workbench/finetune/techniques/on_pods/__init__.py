"""Modules of the techniques that load torch. Only functions on pods import them."""
