"""What is asked: jobs, techniques, datasets and DeepSpeed configurations. Pure: nothing here starts anything."""
