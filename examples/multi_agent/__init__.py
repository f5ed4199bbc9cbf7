"""Several roles of one policy answer a question together, and all of them are trained."""
