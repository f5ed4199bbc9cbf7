"""Utilities for plug-in authors.  A contract test fixes the list of files."""
