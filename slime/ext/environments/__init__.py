"""Conversations with tools and environments of text, and tasks of reasoning-gym as prompts (docs/environments.md)."""
