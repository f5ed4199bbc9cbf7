"""Pushes of changed bytes over a disk, and a hook that carries them elsewhere."""
