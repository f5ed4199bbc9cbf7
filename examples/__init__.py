"""User-side code: plug-ins, tasks and drivers written against slime's public surface only."""
