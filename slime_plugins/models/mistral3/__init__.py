"""Mistral 3, text."""
