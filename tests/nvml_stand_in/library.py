"""Builds the stand-in library: one file for each driver version and set of missing functions."""

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

DRIVER = "580.65.06"
_SOURCE = Path(__file__).with_name("nvml.c")
_FLAGS = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1")


def build(driver: str, missing: frozenset[str]) -> Path:
    """Return the library of `driver`, in which dlsym does not find the functions in `missing`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the stand-in for NVML with")
    return _build(compiler, driver, missing)


@functools.cache
def _build(compiler: str, driver: str, missing: frozenset[str]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nvml-stand-in-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / f"libnvidia-ml.so.{driver}"
    flags = [*_FLAGS, f'-DVERSION="{driver}"']
    if missing:
        hidden = folder / "hidden"
        hidden.write_text("{ local: " + "".join(f"{name}; " for name in sorted(missing)) + "};")
        flags.append(f"-Wl,--version-script={hidden}")
    subprocess.run([compiler, *flags, "-o", library, _SOURCE, "-lpthread"], check=True)
    return library
