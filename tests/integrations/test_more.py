"""What single frameworks have beyond the suite: restarts in Ray."""

import os
from importlib.util import find_spec

import pytest

from tests.integrations.conformance import start

pytestmark = pytest.mark.skipif(
    os.environ.get("GRADHERD_INTEGRATIONS") != "all", reason="slow: runs in `make integrations`"
)


@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed")
def test_ray_restarts_after_a_worker_was_killed(tmp_path):
    start(["-m", "tests.integrations.ray_restart_run", str(tmp_path)])
