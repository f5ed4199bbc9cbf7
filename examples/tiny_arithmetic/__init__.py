"""Sums modulo ten: a task, a tokenizer and a model small enough for GRPO on two CPU cores."""
