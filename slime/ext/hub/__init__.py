"""Exports of a run to the Hugging Face hub."""
