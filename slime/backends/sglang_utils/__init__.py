"""An SGLang engine process, its router, and the clients of both.

Only this package imports ``sglang`` and ``sglang_router`` freely; it imports neither Ray nor Megatron.
"""
