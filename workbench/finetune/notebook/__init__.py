"""What a notebook gets for fine-tuning beyond what every run and cluster has."""
