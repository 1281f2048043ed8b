"""What ranks print: brought into local logs and events, and read again where it grows."""
