"""Forms of Adam that hold less than two fp32 moments of every parameter."""
