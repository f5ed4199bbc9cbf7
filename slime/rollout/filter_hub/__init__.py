"""Which finished groups a rollout keeps: the contract of ``--dynamic-sampling-filter-path`` and two stock filters."""
