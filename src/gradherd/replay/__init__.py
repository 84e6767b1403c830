"""Recorded gradients, shown again to an order or to a sparsifier."""
