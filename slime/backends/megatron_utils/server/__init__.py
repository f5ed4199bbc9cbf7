"""A server of log-probs under a Megatron model: ``scorer`` computes them on all ranks, ``megatron_server`` answers."""
