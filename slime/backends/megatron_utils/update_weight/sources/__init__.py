"""Where the bytes of a push come from: flat buckets, filled from whole tensors or from each rank's shards."""
