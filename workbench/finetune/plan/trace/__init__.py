"""The bytes that a training step holds, counted without a device."""
