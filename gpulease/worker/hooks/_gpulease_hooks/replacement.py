"""Replaces functions and classes of a framework, and restores them."""

from typing import Any, Callable

ReportFailure = Callable[[str], None]
Undo = Callable[[], None]


def replace(owners: "list[Any]", name: str, original: Any, new: Any) -> Undo:
    """Set the attribute `name` of modules or classes to `new`.

    The returned function restores `original` where nothing else has replaced `new` since.
    """
    for owner in owners:
        setattr(owner, name, new)

    def undo() -> None:
        for owner in owners:
            if getattr(owner, name, None) is new:
                setattr(owner, name, original)

    return undo
