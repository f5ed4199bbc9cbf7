"""Several roles of one policy work on a question, and all of them are trained."""
