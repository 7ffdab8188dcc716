"""What one question met on its way through the processes: spans, where they go, and a picture of them."""
