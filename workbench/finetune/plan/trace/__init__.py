"""Count the bytes held during a training step without a device."""
