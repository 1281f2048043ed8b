"""What runs on pods: the agent, the warm server and the trainer. Only this room may import torch."""
