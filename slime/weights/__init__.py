"""HF-named tensors to bytes that an engine can load.  No Megatron, no SGLang, no Ray."""
