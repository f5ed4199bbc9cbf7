"""Low-rank adapters in place of all weights (LoRA, arXiv:2106.09685)."""
