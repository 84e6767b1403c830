"""Sparse gradient exchange: select coordinates, exchange and average them, lose nothing."""
