"""Another release of Slurm than this machine's, out of a newer Debian that is built once.

Machines see it in /usr in place of their own. Its programs run with the libraries of their Debian;
jobs, hooks and gpulease are still those of this machine.
"""

import os
import shutil
import tempfile
from pathlib import Path

from system.root import NoDebian, cached, debootstrap, inside

SUITES = {"24.11": "trixie"}
"""The Debian that has a release."""
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "patchelf")
_LIBRARIES = Path("lib/x86_64-linux-gnu")
_PLUGINS = _LIBRARIES / "slurm-wlm"
_NEWER = Path("lib/gpulease-test")
"""Where the other libraries of the newer Debian are on the machines, below /usr."""
_RECIPE = Path(__file__).read_bytes()


def chosen_release() -> str | None:
    """Return the release that GPULEASE_TEST_SLURM names; None for this machine's own."""
    return os.environ.get("GPULEASE_TEST_SLURM") or None


def release(version: str) -> Path:
    """Return a directory to lay over /usr; built once.

    Raises:
        NoDebian: it cannot be built here.
    """
    if version not in SUITES:
        raise NoDebian(f"no Debian is known for Slurm {version}; known: {', '.join(SUITES)}")
    if os.uname().machine != "x86_64":
        raise NoDebian("only the libraries of x86_64 have a known place")
    if shutil.which("debootstrap", path=f"{os.defpath}:/usr/sbin:/sbin") is None:
        raise NoDebian("not here: debootstrap")
    return cached(f"slurm-{version}", _RECIPE, lambda made: _build(made, SUITES[version]))


def _build(made: Path, suite: str) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as place:
        root = Path(place, "root")
        debootstrap(root, suite, *PACKAGES)
        usr = root / "usr"
        programs = [*usr.glob("bin/s*"), *usr.glob("sbin/slurm*-wlm")]
        programs = [it for it in programs if it.is_file() and b"libslurmfull" in it.read_bytes()]
        for file in (*programs, *(usr / _PLUGINS).glob("*.so")):
            _relink(root, file, is_program=file in programs)
            kept = made / file.relative_to(usr)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, kept)
        # The plugins of this machine's own release must not be seen.
        os.setxattr(made / _PLUGINS, "trusted.overlay.opaque", b"y")
        ignored = shutil.ignore_patterns("slurm-wlm", "perl*", "gconv")
        shutil.copytree(usr / _LIBRARIES, made / _NEWER, symlinks=True, ignore=ignored)


def _relink(root: Path, file: Path, *, is_program: bool) -> None:
    """Have a file load the libraries of its own Debian, and no others."""
    loader = ["--set-interpreter", f"/usr/{_NEWER}/ld-linux-x86-64.so.2"] if is_program else []
    paths = f"/usr/{_PLUGINS}:/usr/{_NEWER}"
    inside(
        root, "patchelf", "--force-rpath", "--set-rpath", paths, *loader,
        f"/{file.relative_to(root)}",
    )  # fmt: skip
