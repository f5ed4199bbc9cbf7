"""A training service: the loop on the user's side, trainer and engines on ours."""
