"""Collect doctests from all modules, except Triton kernels where Triton is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/gradherd/*/triton_*.py"]
