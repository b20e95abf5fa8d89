"""`gpulease kernel`: Jupyter kernels that run as jobs.

A kernel is a kernel.json in a data directory of Jupyter. Its command is `gpulease run`, so each
start of the kernel is a job, which ends with the kernel.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

import gpulease
from gpulease.cli.caller import working_directory
from gpulease.cli.options import takes_its_options
from gpulease.cli.program import ask_python, python_of
from gpulease.cli.quick_parser import NotUnderstood
from gpulease.cli.render import print_stderr, print_stdout, show_page
from gpulease.cli.run_defaults import read_options
from gpulease.cli.tables import Column, Table, line
from gpulease.drawing.words import clean
from gpulease.errors import BadUsage, BadValue, GpuleaseError
from gpulease.locations import environment
from gpulease.units import format_span, parse_memory_range, parse_span

_MAIN = Path(gpulease.__file__).parent / "worker" / "kernel_main.py"
_NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]*", re.ASCII)
"""The names that Jupyter accepts, in lower case; "." and ".." are other folders."""
_HOME = Path("share") / "jupyter" / "kernels"
_HEADINGS = ("NAME", "DISPLAY NAME", "OPTIONS", "IDLE", "DIRECTORY")
_SPEC = "kernel.json"
_OURS = "gpulease"
"""The key of our kernels in the metadata."""


class _Python(NamedTuple):
    """The Python that a kernel runs in."""

    path: str
    version: str
    prefix: Path


@takes_its_options
def kernel(
    action: Annotated[
        Literal["install", "list", "remove"],
        typer.Argument(metavar="ACTION", help="install, list or remove."),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD",
            help="remove: names of kernels; install: after --, options of gpulease run.",
            show_default=False,
        ),
    ] = None,
    *,
    mem: str | None,
    time: str | None,
    idle: str | None,
    name: str | None,
    display_name: str | None,
    prefix: str | None,
    sys_prefix: bool,
) -> None:
    """Install Jupyter kernels that run as jobs, each with a lease.

    The kernel runs under your python, which needs ipykernel. Its lease lasts as
    long as the kernel: until it is restarted, shut down or killed. By default
    it appears in the Jupyter of your user, also in VS Code.

    With --idle 30m, a kernel that has executed nothing for 30 minutes is shut
    down, and its memory is free. Its variables are lost.

    \b
    Examples:
      gpulease kernel install --mem 4G
      gpulease kernel install --mem 8G --name big --idle 1h -- --gpus 2
      gpulease kernel list
      gpulease kernel remove big
    """
    folder = _folder(None if prefix is None else Path(prefix), sys_prefix=sys_prefix)
    if action == "install":
        run = ["--mem", _checked(mem), *(["--time", time] if time else []), *(names or [])]
        if time is not None:
            parse_span(time)
        wanted = _label(mem, names or [])
        called = name or f"{_OURS}-{_checked(mem)}".lower().replace("%", "-percent")
        _install(folder, called, run, display_name or (f"{name}: " if name else "") + wanted, idle)
    elif action == "list":
        rows = []
        for path, spec in _installed(folder):
            ours = spec["metadata"][_OURS]
            ends = format_span(timedelta(seconds=ours["idle"])) if ours.get("idle") else "-"
            cells = path.name, spec.get("display_name", "-"), " ".join(ours["run"]), ends, path
            rows.append(tuple(line(clean(str(cell))) for cell in cells))
        columns = tuple(Column(title, wraps=True, least=12) for title in _HEADINGS)
        if rows:
            show_page([Table(columns, tuple(rows))])
    else:
        _remove(folder, names or [])


def _label(mem: str | None, words: Sequence[str]) -> str:
    """Return the part of the display name after that of the kernel, {python} for the Python.

    Raises:
        BadUsage: the words are not options of gpulease run.
    """
    try:
        count = read_options(words).get("gpus", 1)
    except NotUnderstood as error:
        raise BadUsage(
            f"cannot use {' '.join(words)}: {error}", "gpulease run --help lists the options"
        ) from None
    where = f" on {count} GPUs" if count > 1 else ""
    return f"{{python}}, {mem}{where}, gpulease"


def _checked(mem: str | None) -> str:
    if mem is None:
        raise BadUsage(
            "cannot install a kernel: no --mem is given", "gpulease kernel install --mem 4G"
        )
    parse_memory_range(mem)
    return mem


def _install(folder: Path, name: str, run: list[str], label: str, idle: str | None) -> None:
    if not _NAME.fullmatch(name):
        raise BadValue(
            f"cannot use the name {name!r}: Jupyter allows lower-case letters, digits "
            "and _ - . and no . at the beginning",
            "for the name in menus, use --display-name",
        )
    python = _kernel_python()
    seconds = parse_span(idle).total_seconds() if idle is not None else 0.0
    path = folder / name
    if path.exists() and name not in {found.name for found, _ in _installed(folder)}:
        raise BadValue(
            f"cannot install the kernel {name}: another kernel has this name",
            "choose another one with --name",
        )
    # How to start gpulease without a PATH.
    script = Path(sys.executable).parent / "gpulease"
    command = [str(script)] if script.exists() else [sys.executable, "-m", "gpulease.cli"]
    spec = {
        "argv": [
            # The user's defaults for commands, such as --snapshot, could break each start.
            *command, "run", "--no-defaults", *run, "--name", name, "--no-pty",
            "--end-with-command", "--",
            python.path, str(_MAIN), f"{seconds:g}", "-f", "{connection_file}",
        ],
        "display_name": label.replace("{python}", f"Python {python.version}"),
        "language": "python",
        # A signal would reach gpulease run, where a second one within a second cancels the job.
        "interrupt_mode": "message",
        "metadata": {"debugger": True, _OURS: {"run": run, "idle": seconds}},
    }  # fmt: skip
    verb = "replaced" if path.exists() else "installed"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _SPEC).write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise GpuleaseError(f"cannot install the kernel: {path}: {error.strerror}") from error
    print_stdout(name)
    print_stderr(f"gpulease: {verb} the kernel {name} in {clean(str(path))}")


def _kernel_python() -> _Python:
    """Return the caller's python, if it has ipykernel."""
    path = python_of(Path(working_directory()), environment())
    version, prefix, found = ask_python(path, "ipykernel")
    if not found:
        raise GpuleaseError(
            f"cannot install a kernel for {path}: it has no ipykernel",
            f"{path} -m pip install ipykernel; or activate the environment of the kernel",
        )
    return _Python(path, version, Path(prefix))


def _folder(prefix: Path | None, *, sys_prefix: bool) -> Path:
    if sys_prefix:
        python = python_of(Path(working_directory()), environment())
        return Path(ask_python(python, "ipykernel")[1]) / _HOME
    if prefix is not None:
        return prefix / _HOME
    # The data directory of Jupyter for this user.
    if given := environment().get("JUPYTER_DATA_DIR"):
        return Path(given) / "kernels"
    data = environment().get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "jupyter" / "kernels"


def _installed(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the kernels that this command has installed, by name."""
    for path in sorted(folder.glob(f"*/{_SPEC}")):
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
            ours = spec["metadata"][_OURS]["run"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(ours, list):
            yield path.parent, spec


def _remove(folder: Path, names: list[str]) -> None:
    known = {path.name: path for path, _ in _installed(folder)}
    if not names:
        raise BadUsage("cannot remove a kernel: no name is given", "gpulease kernel list")
    for name in dict.fromkeys(names):
        if name not in known:
            raise BadValue(
                f"cannot remove the kernel {name}: gpulease has installed none of this name in "
                f"{folder}",
                "gpulease kernel list shows them; see also --prefix and --sys-prefix",
            )
        if known[name].is_symlink():
            known[name].unlink()
        else:
            shutil.rmtree(known[name])
        print_stderr(f"gpulease: removed the kernel {name}")
