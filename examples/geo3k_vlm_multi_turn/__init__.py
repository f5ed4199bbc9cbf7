"""Geometry questions with pictures, in several turns: a tool says whether an answer is right."""
