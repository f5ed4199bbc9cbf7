"""Filters of finished groups: the contract of ``--dynamic-sampling-filter-path`` and two stock filters."""
