"""The pages of the first day: their blocks of code run as they stand, one after the other.

A block after `<!-- not run: REASON -->` is left out. Of a block with prompts ($), only the lines
after a prompt are commands.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"(<!-- not run: .+? -->\n+)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)
TRAIN = "import time\n\nmemory = bytearray(2**20)\ntime.sleep(1)\n"
"""What the pages call train.py, where they do not write it themselves."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block that is to run."""
    for not_run, _, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if not not_run:
            prompted = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
            yield language, "\n".join(prompted) if prompted else text


def as_bash(page: Path) -> str:
    """Return one script of all blocks of a page; the one that fails is the last that is named."""
    lines = ["set -e"]
    for number, (language, text) in enumerate(blocks(page), start=1):
        lines.append(f"echo '=== block {number}' >&2")
        lines.append(f"python - <<'PYTHON'\n{text}\nPYTHON" if language == "python" else text)
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["quickstart.md", "first-week.md"])
def test_the_code_of_a_page_runs(daemon: Daemon, tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "GPULEASE_SOCKET": str(daemon.socket),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(programs.parent),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-c", as_bash(DOCS / name)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
