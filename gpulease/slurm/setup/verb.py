"""`gpulease-setup slurm`: prints lines for Slurm's files, installs the hook, and checks both."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gpulease.config import SYSTEM_CONFIG, Settings
from gpulease.errors import GpuleaseError, SetupFailed
from gpulease.setup.install import Say, read_system_settings
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.setup.check import checks, look, try_job
from gpulease.slurm.setup.node_files import (
    DIRECTORY,
    NAME,
    SlurmNode,
    device_files,
    install_hook,
    read_node,
    shown_sizes,
)
from gpulease.units import format_size
from gpulease.wire.machine import CheckView

_MARKS = {"ok": "ok      ", "warning": "warning ", "failure": "FAILURE "}


def slurm(say: Say, *, install: Sequence[Path] | None, check: bool) -> int:
    """Print, install or check; return the exit code.

    Raises:
        GpuleaseError: the settings, the GPUs or Slurm cannot be read, or the hook not be written.
    """
    if (check or install is not None) and os.geteuid() != 0:
        option = "--check" if check else "--install"
        raise SetupFailed(
            f"cannot {option.strip('-')}: only root can do this",
            f"try: sudo gpulease-setup slurm {option}",
        )
    settings = read_system_settings()
    if install is not None:
        install_hook(install or [DIRECTORY], settings.socket, say)
    if check:
        return _show_checks(settings, say)
    if install is None:
        for line in lines(read_node(settings), settings):
            say(line)
    return 0


def lines(node: SlurmNode, settings: Settings) -> Iterator[str]:
    """Yield what Slurm's files should say of this node; comments explain it."""
    yield f"# {node.name}: {shown_sizes(node)}; a shard is {format_size(node.shard)}"
    yield from _remarks(node, settings)
    yield f"\n# {DIRECTORY}/gres.conf, the same on all machines"
    yield from node.gres_conf()
    hook = DIRECTORY / NAME
    yield f"\n# {DIRECTORY}/slurm.conf, the same on all machines"
    yield from ("GresTypes=gpu,shard", "SelectType=select/cons_tres")
    yield from ("ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup")
    yield "SchedulerParameters=nohold_on_prolog_fail"
    yield f"Prolog={hook}\nEpilog={hook}\nTaskProlog={hook}"
    yield f"{_hardware(node)} Gres={node.gres}"
    yield f"\n# {DIRECTORY}/cgroup.conf, the same on all machines"
    yield "ConstrainDevices=yes"


def _remarks(node: SlurmNode, settings: Settings) -> Iterator[str]:
    for gpu in node.local:
        yield f"# GPU {gpu.label} is left to the local queue (local_gpus)"
    if len(node.runs) > 1:
        yield "# The GPUs differ in size. Keep the order of their types in Gres="
    if node.simulated:
        files = device_files(node.minors)
        yield f"# Simulated GPUs: slurmd needs character devices {files}"
    if settings.cluster != "slurm":
        yield f'# gpulease does not use Slurm yet: {SYSTEM_CONFIG} needs cluster = "slurm"'


def _hardware(node: SlurmNode) -> str:
    """Return the line of slurm.conf for the node, as slurmd finds it."""
    found = ""
    with suppress(GpuleaseError, IndexError):  # this machine may be no node yet
        found = run_slurm(("slurmd", "-C")).splitlines()[0].partition(" ")[2]
    return f"NodeName={node.name} {found}".rstrip()


def _show_checks(settings: Settings, say: Say) -> int:
    failed, found = False, look(settings)
    for check in checks(found):
        _say_check(check, say)
        failed = failed or check.state == "failure"
    if failed:
        return 1  # a job now might have Slurm drain the node
    tried = try_job(found)
    _say_check(tried, say)
    return int(tried.state == "failure")


def _say_check(check: CheckView, say: Say) -> None:
    say(f"{_MARKS[check.state]}{check.name}: {check.message}")
    if check.mend:
        say(f"        {check.mend}")
