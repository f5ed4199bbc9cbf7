"""A server of the log-probs of a teacher that Megatron holds."""
