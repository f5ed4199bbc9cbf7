"""A student learns from what a teacher thinks of the student's own answers."""
