"""The trainer's side of a weight push: how a rank fills buckets (``sources``), and when it pushes (``updater``)."""
