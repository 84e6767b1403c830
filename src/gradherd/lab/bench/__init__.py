"""Benchmarks: each compares gradherd, in one run, with what a user would do instead."""
