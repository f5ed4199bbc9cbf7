"""On-policy distillation: a student learns from a teacher's log-probs of the student's own responses."""
