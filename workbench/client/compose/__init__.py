"""What the form of a cell stands for: its options, and what they come to."""
