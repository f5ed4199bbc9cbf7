"""Jobs that outlive deaths, and drivers that start again after a failure."""
