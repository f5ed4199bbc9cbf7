"""Named tensors in the format that the engines hold them in, as the quantization config of a checkpoint says."""
