"""Model layers on top of megatron-core's, and the specs that combine them."""
