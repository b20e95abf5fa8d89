"""One verb for several jobs or GPUs: each is answered for; the exit code is the last failure's."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from gpulease.cli.render import complain, show
from gpulease.errors import GpuleaseError, NoDaemon

T = TypeVar("T")


def for_each(targets: Iterable[T], verb: Callable[[T], str]) -> int:
    """Do something to each and say what came of it; one that fails keeps none from the next.

    Raises:
        NoDaemon: nothing answers, and would not for the next one either.
    """
    status = 0
    for target in dict.fromkeys(targets):
        try:
            show(verb(target))
        except NoDaemon:
            raise
        except GpuleaseError as error:
            complain(error)
            status = error.exit_code
    return status
