"""Turns prompts into kept groups of samples: data source, generation, rewards, filters, buffer.

This package talks to engines over HTTP only.
"""
