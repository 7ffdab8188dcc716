"""Encoders and generators: torch and transformers, no Ray, no gRPC, no FAISS."""
