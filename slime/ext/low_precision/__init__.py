"""Training in the numbers that engines with weights in few bits compute with."""
