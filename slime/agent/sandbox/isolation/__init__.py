"""The program that isolates other programs: namespaces, limits, and a supervisor in them.

It is started as ``python -I -S isolation/__main__.py``, by ``slime.agent.sandbox.runner``.  Only the standard library
is imported, and nothing else of slime: the process must start fast, and have one thread when it enters namespaces.
"""
