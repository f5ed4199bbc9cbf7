"""Ways to reach engines that do not share the trainer's GPUs: with our loader, and stock ones."""
