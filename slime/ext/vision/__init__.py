"""Vision towers: what a run has that trains on images in a model whose checkpoint has a tower."""
