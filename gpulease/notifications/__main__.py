"""Send one message to all receivers of this user, and report what happened at each.

All receivers get it at the same time, and this program does not wait for those that hang: the shim
around it ends what it has started.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from queue import Empty, SimpleQueue

import msgspec

from gpulease.errors import GpuleaseError
from gpulease.notifications.receivers import NotSent, Receiver, receivers_of
from gpulease.notifications.settings import read_notify_settings
from gpulease.wire.notifications import (
    END,
    VARIABLE,
    NotificationOrder,
    ReceiverView,
)

_SHARE = 0.9
"""The part of the time that each receiver has."""
_NONE = (
    "no receiver is configured",
    "set command or urls in [notify] of ~/.config/gpulease/config.toml",
)


def main() -> None:
    """Send the message that the environment has."""
    order = msgspec.json.decode(os.environ.pop(VARIABLE), type=NotificationOrder)
    os.environ.pop("PYTHONPATH", None)  # gpulease's, where the user's command finds wrong modules
    os.umask(0o077)
    for result in _send(order):
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()
    sys.stdout.write(END.decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # receivers that hang are left behind


def _send(order: NotificationOrder) -> Iterator[ReceiverView]:
    try:
        settings = read_notify_settings(os.environ)
        receivers = receivers_of(settings)
    except GpuleaseError as error:
        yield ReceiverView("", error=error.message, hint=error.hint, is_final=True)
        return
    until = settings.quiet_until(datetime.now().astimezone())
    if until is not None and not order.verbose:  # not a test
        yield ReceiverView("", error="quiet hours", quiet_until=until)
        return
    order = order if settings.details else replace(order, details="")
    if not receivers:
        yield ReceiverView("", error=_NONE[0], hint=_NONE[1], is_final=True)
    yield from _results([each for each in receivers if each.key not in order.done], order)


def _results(receivers: Sequence[Receiver], order: NotificationOrder) -> Iterator[ReceiverView]:
    """Yield what happened at each receiver, as soon as it is known."""
    results: SimpleQueue[ReceiverView] = SimpleQueue()
    waiting = {each.key: each for each in receivers}
    for each in waiting.values():
        arguments = (each, order, results)
        threading.Thread(target=_send_one, args=arguments, daemon=True).start()
    deadline = time.monotonic() + order.within_s
    while waiting:
        try:
            result = results.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        del waiting[result.key]
        yield result
    for each in waiting.values():
        yield ReceiverView(each.name, each.key, f"no answer within {order.within_s:.0f}s")


def _send_one(
    receiver: Receiver, order: NotificationOrder, results: "SimpleQueue[ReceiverView]"
) -> None:
    result = ReceiverView(receiver.name, receiver.key)
    try:
        # A little less than the limit, so that the reason is that of the receiver.
        output = receiver.send(order, order.within_s * _SHARE)
    except NotSent as error:
        result = replace(
            result, error=str(error), hint=error.hint, is_final=error.is_final, output=error.output
        )
    except Exception as error:  # noqa: BLE001  of one receiver, which may be a plugin of Apprise
        result = replace(result, error=f"it failed: {type(error).__name__}", output=repr(error))
    else:
        result = replace(result, output=output)
    results.put(result if order.verbose else replace(result, output=""))


if __name__ == "__main__":
    main()
