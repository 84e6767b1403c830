"""tests/slow.txt: what it lists exists, or a test that was renamed would be quick again unseen."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_slow_test_exists():
    listed = (ROOT / "tests" / "slow.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    for entry in listed:
        file, _, name = entry.partition("::")
        assert (ROOT / file).is_file(), entry
        if name:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), entry
