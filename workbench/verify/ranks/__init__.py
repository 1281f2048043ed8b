"""Functions that the ranks call. Only these modules import torch."""
