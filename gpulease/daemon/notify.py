"""What the daemon tells systemd: sd_notify(3), spoken by hand since it is one datagram."""

import contextlib
import socket


def notify(address: str | None, message: str) -> None:
    """Send `message` to the socket that systemd named in NOTIFY_SOCKET, if it named one."""
    if not address:
        return
    # A leading @ stands for the NUL byte of an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
    ):
        sender.sendto(message.encode(), target)
