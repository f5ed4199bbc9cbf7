"""Extensions: each folder adds one thing to the core, and the core trains without it.

An extension imports the core and no other extension.  The core imports none: ``slime/compose.py`` chooses them.
"""
