"""GRPO of a pretrained model on a task that this project did not make: SmolLM2-135M-Instruct and reasoning-gym."""
