"""Documents to passages to embeddings, ready for the index tier to build a snapshot from."""
