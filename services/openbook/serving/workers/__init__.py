"""The encoder and the generator at work: in batches, in this process or behind a handle."""
