"""The Megatron trainer.  Importing this package imports and patches nothing."""
