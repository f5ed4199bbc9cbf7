"""The parts of a plan that are read from ``args``, one file each.

Only here the package knows the two backends; what these files call is arithmetic over frozen configs.
"""
