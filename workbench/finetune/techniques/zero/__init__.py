"""Stages of DeepSpeed's ZeRO."""
