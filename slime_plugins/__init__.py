"""What is loaded by path, from a flag: model layers, bridges.  Nothing in slime imports it."""
