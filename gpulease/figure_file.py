"""Files with figures, by matplotlib, which is an optional dependency and imported here only.

No window system is needed: a `Figure` without pyplot draws into a file alone.
"""

from collections.abc import Collection
from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

from gpulease.daemon_packages import install_hint
from gpulease.errors import BadValue, GpuleaseError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure; its size is in inches.

    Raises:
        GpuleaseError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GpuleaseError(
            "cannot plot: matplotlib is not installed",
            install_hint("plot"),
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def label_times(axes: "Axes", zone: tzinfo | None) -> None:
    """Label the horizontal axis with times of a zone; the date stands once, at its end."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(zone)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, zone)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)


def check_target(path: Path, example: str, endings: Collection[str] | None = None) -> None:
    """Check that a figure can be written into a file, before there is one.

    Args:
        path: the file.
        example: a good name, for the hint.
        endings: those that are possible, without dots; None: all that matplotlib can write.

    Raises:
        BadValue: the ending is unknown, or there is something that is not a file.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes() if endings is None else endings
    if path.suffix.removeprefix(".").lower() not in known:
        raise BadValue(
            f"cannot plot into {path}: unknown kind of file",
            f"use a name such as {example}; known endings: {', '.join(sorted(known))}",
        )
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "no regular file"
        raise BadValue(f"cannot plot into {path}: it is {what}", f"name a file, such as {example}")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure into a file.

    Raises:
        BadValue: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BadValue(f"cannot write {path}: {error.strerror}") from error
