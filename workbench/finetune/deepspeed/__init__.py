"""Read, check and complete DeepSpeed configurations for the pods of a run."""
