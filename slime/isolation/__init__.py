"""Isolation of programs whose input or code comes from a model: graders, tools, agents' commands.

``view`` gives the command, which runs ``python -I -S isolation/__main__.py``: that program makes namespaces and limits
and a supervisor in them.  It imports the standard library alone and nothing else of slime: it must start fast, and
have one thread when it enters namespaces.
"""
