"""What a rank keeps to go on training later."""
