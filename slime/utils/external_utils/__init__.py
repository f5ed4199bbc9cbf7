"""Tools for scripts that drive slime from outside."""
