"""A model folder made from another one, shard by shard, in parallel, resumable; see ``run.rewrite_folder``."""
