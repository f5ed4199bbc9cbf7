"""The weight push: calls to an engine, participants and state of a push, and payloads of its buckets."""
