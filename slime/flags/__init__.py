"""The flags that slime owns, one file per group.

A file declares the flags of its group (``add_*_arguments``), derives further values (``derive_*``), checks
combinations (``check_*``), and builds the configs of lower layers (``*_config``).  A ``FlagGroup`` combines the first
three; slime/flags/parse.py lists the core's groups.
"""
