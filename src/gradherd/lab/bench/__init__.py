"""Benchmarks: each compares gradherd, in one run, with what a user would do instead."""

# Here, where nothing imports torch: the command line shows these names in its help.
STEP_EXCHANGES = ("fp16", "powersgd", "exdyna", "exdyna-int2", "local-4")
"""What `bench_step` can measure beside the dense exchange of both orders."""
