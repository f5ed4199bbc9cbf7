"""Counting shapes of a color in images: a task, and a vision-language model that learns it on two CPU cores."""
