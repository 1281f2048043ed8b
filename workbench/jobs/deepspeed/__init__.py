"""DeepSpeed configurations: found, checked, and filled in for the pods they run on."""
