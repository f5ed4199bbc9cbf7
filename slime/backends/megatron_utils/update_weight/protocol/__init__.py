"""What is said in which order: the steps of a push, who is still in it, and what the engines must acknowledge."""
