"""User code: plug-ins, tasks and drivers."""
