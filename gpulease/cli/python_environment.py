"""The Python that runs a caller's .py jobs, and what is installed for it.

Which frameworks are held to a lease, by what, and with which versions that was tried.

The one table of it: `doctor` compares it with what the user's python has installed.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpulease.cli.caller import environment, trusted_environment, working_directory
from gpulease.cli.program import python_of
from gpulease.errors import CommandNotExecutable, GpuleaseError
from gpulease.wire.views import CheckView

_DOCS = "docs/frameworks.md says what is limited, and what is not"


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework, and how it is held."""

    name: str
    distributions: tuple[str, ...]
    """What it is called where packages come from, the usual name first."""
    held_by: str | None
    """None: it is shown the leased GPUs alone, and takes of them what it wants."""
    oldest: tuple[int, ...] = ()
    """What is older is not held."""
    tried: tuple[str, ...] = ()
    """The minor versions with which the tests were run."""


FRAMEWORKS = (
    Framework(
        "tensorflow",
        ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-gpu"),
        "the hook",
        oldest=(2,),
        tried=("2.21",),
    ),
    Framework("torch", ("torch",), "the hook", tried=("2.13",)),
    Framework("jax", ("jax",), "the hook and a variable in the environment", tried=("0.10",)),
    Framework("jaxlib", ("jaxlib",), "as jax is", tried=("0.10",)),
    Framework(
        "cupy",
        ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
        "a variable in the environment",
    ),
)
DISTRIBUTIONS = tuple(name for each in FRAMEWORKS for name in each.distributions)


def framework_checks(installed: Mapping[str, str]) -> Iterator[CheckView]:
    """Yield a check for each framework among `installed`, the versions of distributions by name."""
    none = True
    for framework in FRAMEWORKS:
        for name in framework.distributions:
            if name in installed:
                none = False
                yield _framework_check(framework, name, installed[name])
                break
    if none:
        yield CheckView(
            "frameworks",
            "warning",
            "that python has neither tensorflow, torch, jax nor cupy",
            "activate the environment that has what your jobs use",
        )


def _framework_check(framework: Framework, name: str, version: str) -> CheckView:
    shown = f"{name} {version}"
    if framework.held_by is None:
        return CheckView(
            framework.name, "warning", f"{shown} is not held to the lease by anything in it", _DOCS
        )
    if framework.oldest and _numbers(version)[: len(framework.oldest)] < framework.oldest:
        oldest = ".".join(map(str, framework.oldest))
        return CheckView(
            framework.name, "warning", f"{shown} is not held to the lease: it is too old",
            f"use {name} {oldest} or later; {_DOCS}",
        )  # fmt: skip
    said = f"{shown} is held to the lease on real GPUs by {framework.held_by}"
    minor = ".".join(map(str, _numbers(version)[:2]))
    if framework.tried and minor not in framework.tried:
        tried = ", ".join(framework.tried)
        return CheckView(
            framework.name, "ok", f"{said}, which was tried with {tried}",
            "a job says so at its start if the hook does not fit; --strict has it fail then",
        )  # fmt: skip
    return CheckView(framework.name, "ok", said)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 21, 0) of 2.21.0rc1."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


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
