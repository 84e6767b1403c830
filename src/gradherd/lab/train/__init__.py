"""Training a task: on real ranks, or all workers in one process; what was seen is a record."""
