"""Tool use: the policy writes Python code, which a sandbox runs."""
