"""The verified push: shards, digests, two phases, and the loader inside engines that verifies what they hold."""
