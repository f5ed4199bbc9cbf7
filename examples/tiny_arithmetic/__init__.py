"""Sums modulo ten: a task, a tokenizer and a model small enough to see GRPO work on two CPU cores."""
