"""The modules that models are built of, on top of megatron-core's, and the specs that put them together."""
