"""Tool use: the policy writes Python, a sandbox runs it."""
