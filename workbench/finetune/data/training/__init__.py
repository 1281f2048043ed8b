"""Training and evaluation rows of a rank."""
