"""The two engines that slime drives: Megatron-core to train, SGLang to generate."""
