"""Dynamic sampling filters: the contract of ``--dynamic-sampling-filter-path`` and two built-in filters."""
