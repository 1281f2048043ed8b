"""Rates, memory and waits of one GPU, beside plain transformers."""
