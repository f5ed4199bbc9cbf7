"""Plug-ins loaded by path from a flag: model layers, bridges, the rollout buffer."""
