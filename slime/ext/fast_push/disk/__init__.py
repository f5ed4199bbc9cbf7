"""Pushes over a shared disk: whole versions, changes, copies on the engines' hosts, and trainers that end between."""
