"""What was computed before: an in-process cache in front of Redis."""
