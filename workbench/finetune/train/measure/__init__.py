"""What is measured while it trains: time and rows of a step, traffic, FLOPS and traces."""
