"""Sources of a push: flat buckets, filled from whole tensors or from each rank's shards."""
