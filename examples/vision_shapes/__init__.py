"""Shapes in pictures, counted by colour: a task, and a vision-language model that learns it on two cores."""
