"""Doctests are looked for in all modules; those for a GPU cannot be imported without Triton."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/gradherd/*/triton_*.py"]
