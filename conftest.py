"""Collect doctests from all modules (Triton kernels only with Triton), and set up hypothesis."""

from importlib.util import find_spec

from hypothesis import settings

# A busy machine may be slow to answer; that alone is no failure.
settings.register_profile("gradherd", deadline=None)
settings.load_profile("gradherd")

collect_ignore_glob = [] if find_spec("triton") else ["src/gradherd/*/triton_*.py"]
