"""One shard in memory: FAISS finds candidates, exact scores decide."""
