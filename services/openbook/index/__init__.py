"""The index tier: snapshots on disk, FAISS behind gRPC, all shards as one. Neither torch nor Ray come in here."""
