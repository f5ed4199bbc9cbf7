"""One SGLang engine process, its router, and how to talk to them.

The only package that imports ``sglang`` and ``sglang_router`` freely; it imports no Ray and no Megatron.
"""
