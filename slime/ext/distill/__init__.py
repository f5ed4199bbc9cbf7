"""Teachers behind a server: what the rollout asks them, and a server of the log-probs of one that Megatron holds."""
