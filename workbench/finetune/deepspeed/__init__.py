"""DeepSpeed configurations: read, checked, and filled in for the pods they run on."""
