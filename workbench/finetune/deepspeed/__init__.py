"""Read and check DeepSpeed configurations, and complete them for the pods of a run."""
