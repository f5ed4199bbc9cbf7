"""Policy losses, one per file; each gives one number per response token, to be reduced by ``algorithms.reduction``."""
