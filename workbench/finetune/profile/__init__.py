"""Read and compare the reports of DeepSpeed's FLOPS profiler."""
