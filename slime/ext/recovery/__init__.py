"""Drivers that start again after a failure."""
