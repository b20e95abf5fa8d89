"""`make demo`: what a newcomer sees first."""

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_shares_queues_and_stops_in_forty_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEMO], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )

    assert "within the hour, after job 2" in done.stdout
    assert "gpulease: job 5 is stopped" in done.stderr
    assert "next  active" in done.stdout
    assert len((done.stdout + done.stderr).splitlines()) <= 42
