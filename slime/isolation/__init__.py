"""Isolates programs whose input or code comes from a model: graders, tools, agents' commands.

``view`` returns a command that runs ``python -I -S isolation/__main__.py``, which sets up namespaces, limits and a
supervisor in them.  That program imports only the standard library and this package: it must start fast, and must have
a single thread when it enters namespaces.
"""
