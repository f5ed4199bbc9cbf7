"""The parts of a Megatron checkpoint: what is written, how, and whether it fits the model."""
