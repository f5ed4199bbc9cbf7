"""Geometry questions with images, in several turns with a tool that checks answers."""
