"""One index server: the snapshots it holds, the calls it answers, over gRPC and without."""
