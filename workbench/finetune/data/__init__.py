"""Read and check training rows, and convert every row to the trainer's form."""
