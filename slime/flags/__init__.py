"""The flags that slime owns, one file for each group.

A file declares the flags of its group (``add_*_arguments``), fills in what follows from them (``derive_*``), says what
cannot work (``check_*``), and gives the config that code below takes (``*_config``).  A ``FlagGroup`` holds the first
three; those of the core are listed in slime/flags/parse.py.
"""
