"""Turns HF-named tensors into bytes that an engine can load.  No Megatron, no SGLang, no Ray."""
