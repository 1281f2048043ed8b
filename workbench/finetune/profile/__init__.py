"""The report of DeepSpeed's FLOPS profiler as records."""
