"""Measurements, side by side in one run with what a user would do instead."""
