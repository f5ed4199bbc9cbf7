"""From the trainer's flags to complete, checked arguments and megatron-core's config objects."""
