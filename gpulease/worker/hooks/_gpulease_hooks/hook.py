"""What the hooks share: replace functions of a framework, restore them, and report failures."""

import os
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from .lease import Lease, LeaseTooSmall

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


def wrap(owners: "list[Any]", name: str, wrapper: Callable[[Any], Any]) -> Undo:
    """Replace a name in modules or classes by what `wrapper` makes of it."""
    original = getattr(owners[0], name)
    return replace(owners, name, original, wrapper(original))


def lifting(lease: Lease, *undos: Undo) -> Undo:
    """Return a function that removes a hook: it lifts the lease and calls `undos`."""

    def lift() -> None:
        lease.lift()
        for undo in undos:
            undo()

    return lift


@contextmanager
def reporting(report_failure: ReportFailure, sentence: str) -> Iterator[None]:
    """Report an error with a sentence before it: a failed hook must not end the script.

    A lease that is too small does end it.
    """
    try:
        yield
    except LeaseTooSmall:
        raise
    except Exception as error:  # noqa: BLE001  (as above)
        report_failure("{}: {}: {}".format(sentence, type(error).__name__, error))


def visible_gpus(lease: Lease) -> "list[dict[str, Any]]":
    """Return the leased GPUs that this process may see, in CUDA's order."""
    return lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def is_older(framework: Any, version: "tuple[int, int]") -> bool:
    """Tell whether a framework is older than a version; False if that is not known."""
    parts = str(getattr(framework, "__version__", "")).split(".")[:2]
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) < version


def version_of(framework: Any) -> str:
    """Return the version of an imported framework."""
    return str(getattr(framework, "__version__", "unknown"))
