"""Distributed PyTorch training in fewer epochs and fewer bytes."""

__version__ = "0.1.0.dev0"
