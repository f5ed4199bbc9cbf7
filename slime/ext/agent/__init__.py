"""Generate functions that let an agent play, by the adapters of ``slime.agent``."""
