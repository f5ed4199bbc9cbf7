"""GRPO of a pretrained model on a third-party task: SmolLM2-135M-Instruct and reasoning-gym."""
