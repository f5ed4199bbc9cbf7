"""The verified push: shards, digests, two phases, and the loader inside engines that vouches for what they hold."""
