"""Embeddings of questions seen before: an in-process cache in front of Redis."""
