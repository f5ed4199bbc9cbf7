"""A plug-in package as a user of slime would write it: from the public surface alone.

The task: the model answers sums and may call a calculator by writing ``<calc>2+3</calc>``. Every module below is one
family of hooks. Nothing here looks behind a documented name, and nothing is adapted to how slime is built inside, so
when one of these files has to change for a change of slime, a user's file would have had to change too.

Settings come from ``--custom-config-path calculator.yaml`` and arrive as attributes of ``args``.
"""
