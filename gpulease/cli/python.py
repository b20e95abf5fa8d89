"""The Python that runs a caller's .py jobs, and what is installed for it."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpulease.cli.caller import environment, trusted_environment, working_directory
from gpulease.cli.frameworks import DISTRIBUTIONS, FRAMEWORKS, framework_checks
from gpulease.cli.program import python_of
from gpulease.errors import CommandNotExecutable, GpuleaseError
from gpulease.wire import CheckView

_ANSWERS_WITHIN = 20.0
_CAN_BE_PROVED = ("tensorflow", "torch", "jax")
_ASK_VERSIONS = """
import json, sys
found = {}
try:
    from importlib import metadata
except ImportError:
    metadata = None
for name in sys.argv[1:] if metadata else ():
    try:
        found[name] = str(metadata.version(name))
    except Exception:
        pass
print(json.dumps([sys.version.split()[0], found]))
"""
"""What is installed, without importing it: TensorFlow takes seconds, and memory on a GPU."""


@dataclass(frozen=True, slots=True)
class Python:
    """What was found out about one."""

    path: str
    checks: Sequence[CheckView]
    installed: Sequence[str] = ()
    """Distributions of frameworks."""

    @property
    def frameworks(self) -> list[tuple[str, str]]:
        """The frameworks that can be put to the proof, each with the Python that has it."""
        there = frozenset(self.installed)
        return [
            (each.name, self.path)
            for each in FRAMEWORKS
            if each.name in _CAN_BE_PROVED and there.intersection(each.distributions)
        ]

    @classmethod
    def of_the_caller(cls) -> Self:
        """Find it as `run` does, and ask it."""
        try:
            path = python_of(Path(working_directory()), environment())
        except CommandNotExecutable as error:
            skipped = f"skipped, with its frameworks: {error.message}"
            return cls("", [CheckView("python", "warning", skipped, error.hint)])
        except GpuleaseError as error:
            return cls("", [CheckView("python", "warning", error.message, error.hint)])
        try:
            asked = subprocess.run(
                [path, "-c", _ASK_VERSIONS, *DISTRIBUTIONS],
                env=trusted_environment(),
                capture_output=True,
                text=True,
                check=True,
                timeout=_ANSWERS_WITHIN,
                stdin=subprocess.DEVNULL,
                # Python imports from where a -c was started, which may be anybody's directory.
                cwd="/",
            )
            version, installed = json.loads(asked.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
            said = f"{path} does not work: {error}"
            return cls(path, [CheckView("python", "warning", said)])
        runs = CheckView("python", "ok", f".py jobs run under {path} ({version})")
        return cls(path, [runs, *framework_checks(installed)], tuple(installed))
