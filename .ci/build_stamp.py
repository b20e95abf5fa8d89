"""Stamp each wheel and sdist with its commit and date, which `gpulease --version` shows.

The stamp is gpulease/build.txt inside the archive. Nothing is written to the source tree, and an
editable installation has none.
"""

import os
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STAMP = "gpulease/build.txt"


class Stamp(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the stamp to what is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the stamp; an sdist has one, which its wheels keep."""
        if version == "editable" or Path(self.root, STAMP).exists():
            return
        folder = tempfile.mkdtemp()
        stamp = Path(folder, "build.txt")
        stamp.write_text(f"{self._stamp()}\n", encoding="utf-8")
        build_data["force_include"][str(stamp)] = STAMP

    def _stamp(self) -> str:
        # See reproducible-builds.org/specs/source-date-epoch.
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        at = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
        commit = self._git("rev-parse", "--short=10", "HEAD")
        if not commit:
            return f"built {at:%Y-%m-%d %H:%M} UTC, commit unknown"
        changed = " with changes" if self._git("status", "--porcelain") else ""
        return f"commit {commit}{changed}, built {at:%Y-%m-%d}"

    def _git(self, *arguments: str) -> str:
        """Return what git says, or nothing where there is none or this is no checkout."""
        if not Path(self.root, ".git").exists():
            return ""
        command = ["git", "-C", self.root, *arguments]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""
