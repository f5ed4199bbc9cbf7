"""A plug-in package as a user of slime would write it, using only the public surface.

The task: the model answers sums and may call a calculator by writing ``<calc>2+3</calc>``. Every module below is one
family of hooks. Nothing here uses undocumented names or depends on how slime is built inside, so
if a change of slime requires a change here, a user's file would have to change too.

Settings come from ``--custom-config-path calculator.yaml`` and arrive as attributes of ``args``.
"""
