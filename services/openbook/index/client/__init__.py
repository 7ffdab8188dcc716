"""All index servers as one index, seen from those who ask."""
