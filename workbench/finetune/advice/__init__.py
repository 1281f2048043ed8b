"""What a fault means and which fixes are likely."""
