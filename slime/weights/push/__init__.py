"""The weight push: verbs of an engine, the order of a push, and the transports that carry its buckets."""
