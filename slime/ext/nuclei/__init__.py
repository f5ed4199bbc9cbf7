"""Sampling with top-p below 1: the nuclei that an engine drew from come back with its answers."""
