"""One verb for several jobs or GPUs: each is answered for; the exit code is the last failure's."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from gpulease.cli.format import index_of
from gpulease.cli.render import complain, show
from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon

T = TypeVar("T")


def strange_first(client: Client, gpus: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that no GPU of `status` has, and the others.

    So that nothing has been done yet when the daemon refuses one of the first.
    """
    there = [(index_of(gpu), gpu.uuid.lower()) for gpu in client.status().gpus]
    strange: list[str] = []
    known: list[str] = []
    for name in dict.fromkeys(gpus):
        meant = [gpu for gpu in there if name == gpu[0] or gpu[1].startswith(name.lower())]
        (known if len(meant) == 1 else strange).append(name)
    return strange, known


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
