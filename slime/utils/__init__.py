"""The kit that plug-in authors import; it imports nothing else of slime.  A test lists its files."""
