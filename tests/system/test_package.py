"""The Debian package: from nothing to the first job, an upgrade beside a job, and a purge."""

import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from goldens import mentions

from . import root
from .conftest import CONFIG, SERVICE, WEB, Gpulease
from .machine import Machine


@pytest.fixture(scope="module")
def package() -> Path:
    """Build the package, uncompressed, which makes no difference here."""
    bin_directory = str(Path(sys.executable).parent)
    said = root.run(
        *("env", "COMPRESSION=none", str(root.REPOSITORY / ".ci/deb")),
        *(bin_directory, root.RELEASE),
    )
    return root.REPOSITORY / said.rpartition("\n")[0].rpartition("\n")[2].partition(":")[0]


@pytest.fixture
def machine(debian: Path, package: Path, tmp_path: Path) -> Iterator[Machine]:
    """Yield a bare Debian with the package in /tmp, and a newer one."""
    found = Machine(tmp_path / "machine", [debian])
    try:
        found.boot()
        shutil.rmtree(found.root / "opt/gpulease")
        shutil.copy(package, found.root / "root/gpulease.deb")
        _make_newer(package, found.root / "root/newer.deb", tmp_path / "newer")
        yield found
    finally:
        found.remove()


def _make_newer(package: Path, target: Path, folder: Path) -> None:
    root.run("dpkg-deb", "--raw-extract", str(package), str(folder))
    control = folder / "DEBIAN/control"
    control.write_text(control.read_text().replace("Version: 0.", "Version: 1."))
    (version,) = folder.glob("opt/gpulease/lib/*/site-packages/gpulease/build.txt")
    version.write_text("the newer one\n")
    root.run("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(folder), str(target))


def test_it_is_refused_over_an_installation_by_pip(
    disk: Sequence[Path], package: Path, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, disk)
    try:
        machine.mount()
        shutil.copy(package, machine.root / "gpulease.deb")
        with pytest.raises(AssertionError) as refused:
            root.inside(machine.root, "dpkg", "--install", "/gpulease.deb")
        assert mentions(str(refused.value), "by pip", "gpulease-setup remove", "hint: ")
        assert (machine.root / "opt/gpulease/bin/pip").exists()
    finally:
        machine.remove()


@pytest.mark.timeout(600)
def test_two_commands_to_a_job_an_upgrade_beside_it_and_no_trace_after_a_purge(
    machine: Machine,
) -> None:
    gpulease = Gpulease(machine)
    before, groups = machine.files(), machine.run("getent", "group").stdout
    _dpkg(machine, "--install", "/root/gpulease.deb")
    assert machine.unit(SERVICE, "UnitFileState") == {"UnitFileState": "enabled"}
    assert machine.run("gpuleased", "--check").returncode == 0
    gpulease.configure(CONFIG)
    machine.run("systemctl", "restart", SERVICE)
    assert gpulease.run("run", "--mem", "1G", "--", "id", "-un") == "alice\n"

    # The units are those of the package.
    said = machine.run("gpulease-setup", "install", "--web", "--now").stdout
    assert "/usr/local" not in said
    assert machine.unit(WEB, "ActiveState") == {"ActiveState": "active"}

    job = gpulease.submit("--mem", "6G", "--", "sh", "-c", "while ! test -e go; do sleep .1; done")
    waiting = gpulease.submit("--gpus", "2", "--mem", "6G", "--", "true")
    started, daemon = gpulease.wait_until(job, "active"), gpulease.pid()
    _dpkg(machine, "--install", "/root/newer.deb")
    gpulease.wait_until_back(daemon)
    assert "the newer one" in gpulease.run("--version")
    assert gpulease.job(job)["pid"] == started["pid"]
    assert gpulease.job(waiting)["state"] == "queued"

    refused = _dpkg(machine, "--remove", "gpulease", check=False)
    assert mentions(refused, f"job {job} is running")
    assert machine.unit(SERVICE, "ActiveState") == {"ActiveState": "active"}
    machine.run("touch", "go", user="alice")
    gpulease.wait_until(waiting, "ended")
    # The shim of a job that ends at once lives longer than the job.
    gpulease.run("run", "--mem", "1G", "--", "true")

    _dpkg(machine, "--remove", "gpulease")
    assert machine.unit(SERVICE, "ActiveState") == {"ActiveState": "inactive"}
    assert not (machine.root / "opt/gpulease").exists()
    _dpkg(machine, "--install", "/root/newer.deb")
    assert gpulease.job(job)["exit_status"] == 0, "the record was kept"

    _dpkg(machine, "--purge", "gpulease")
    machine.run("rm", "go", user="alice")
    # dpkg takes an empty directory that no other package has.
    assert machine.files() == before - {"/opt"}
    assert machine.run("getent", "group").stdout == groups


def test_every_file_is_roots_and_as_old_as_the_commit(package: Path) -> None:
    rows = root.run("dpkg-deb", "--contents", str(package)).splitlines()
    assert len({re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", row)[0] for row in rows}) == 1  # type: ignore[index]
    assert {row.split()[1] for row in rows} == {"root/root"}
    assert not [row for row in rows if not re.match(r"(drwxr-xr-x|-rwxr-xr-x|-rw-r--r--|l)", row)]


def _dpkg(machine: Machine, *arguments: str, check: bool = True) -> str:
    """Run dpkg inside and return all that was said."""
    done = machine.run("dpkg", *arguments, check=check, within_s=300)
    return done.stdout + done.stderr


def test_the_description_on_an_index_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert "docs/admin/install.md" in (root.REPOSITORY / "README.md").read_text()
    assert "Description-Content-Type: text/markdown" in text
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", text)
