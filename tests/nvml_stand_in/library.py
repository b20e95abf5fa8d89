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
_CUDA = Path(__file__).with_name("cuda.c")
_FLAGS = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


def build(driver: str, missing: frozenset[str]) -> Path:
    """Return the library of `driver`, in which dlsym does not find the functions in `missing`."""
    return _build(_compiler(), driver, missing)


@functools.cache
def build_cuda() -> Path:
    """Return a libcuda.so.1 that counts on the first GPU of the stand-in."""
    library = _folder() / "libcuda.so.1"
    flags = [*_FLAGS, "-Wl,-soname,libcuda.so.1"]
    subprocess.run([_compiler(), *flags, "-o", library, _CUDA], check=True)
    return library


def _compiler() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the stand-ins for the driver with")
    return compiler


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nvml-stand-in-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _build(compiler: str, driver: str, missing: frozenset[str]) -> Path:
    folder = _folder()
    library = folder / f"libnvidia-ml.so.{driver}"
    flags = [*_FLAGS, "-Wl,-soname,libnvidia-ml.so.1", f'-DVERSION="{driver}"']
    if missing:
        hidden = folder / "hidden"
        hidden.write_text("{ local: " + "".join(f"{name}; " for name in sorted(missing)) + "};")
        flags.append(f"-Wl,--version-script={hidden}")
    subprocess.run([compiler, *flags, "-o", library, _SOURCE, "-lpthread"], check=True)
    return library
