"""Where the page listens: on a port, on a Unix socket, or on what systemd has opened for it."""

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

from gpulease.errors import BadConfiguration, BadUsage, GpuleaseError
from gpulease.locations import runtime_directory
from gpulease.path_ownership import open_to_others
from gpulease.user_daemon import private_folder

_UNACKNOWLEDGED_MS = 30_000
"""Time without an acknowledgement after which the kernel drops a connection and its buffers."""
_LARGEST_PORT = 65535
_BACKLOG = 256
_FIRST_PASSED = 3
"""The descriptor of the first socket that systemd passes; see sd_listen_fds(3)."""
_TABLE = Path("/proc/net/tcp")
_LOCAL, _REMOTE, _UID = 1, 2, 7
"""Columns of that table; see proc_net_tcp in the kernel's documentation."""


def listen(address: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT, [HOST]:PORT or unix:PATH.

    Raises:
        BadUsage: that is no address.
        GpuleaseError: nothing can listen there.
    """
    try:
        if address.startswith("unix:"):
            # Its directory decides who may connect; a port is open to all as well.
            return _listen_on_path(Path(address.removeprefix("unix:")), 0o666)
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > _LARGEST_PORT:
            raise BadUsage(
                f"cannot listen on {address!r}: it is not an address",
                "--listen 127.0.0.1:8080, --listen [::1]:8080, --listen unix:/path",
            )
        return _listen_on_port(host.strip("[]"), int(port))
    except OSError as error:
        raise GpuleaseError(
            f"cannot listen on {address}: {error.strerror or error}",
            "--listen names another address",
        ) from error


def listen_for_own(*, on_port: bool) -> socket.socket:
    """Return a socket for a page that acts as its user.

    It is a Unix socket that only the user can open, unless systemd passes a socket, or a browser on
    this machine needs a port: then each connection has to be checked, see `user_of_peer`.

    Raises:
        GpuleaseError: nothing can listen there, or the user has such a page already.
    """
    if is_passed():
        return _passed()
    if on_port:
        return _listen_on_port("127.0.0.1", 0)
    path = Path(runtime_directory()) / "web.sock"
    private_folder(path.parent, "serve your jobs")
    for part in path.resolve().parents:
        if (why := open_to_others(part)) is not None:
            raise GpuleaseError(
                f"cannot serve your jobs: {why}, and could replace the socket there",
                f"chmod go-w {part}, or set XDG_RUNTIME_DIR to a directory of your own",
            )
    if _answers(path):
        raise GpuleaseError(
            f"cannot serve your jobs: you serve them already, on {path}",
            f"the ssh line is the same: {ssh_line(str(path))}",
        )
    try:
        return _listen_on_path(path, 0o600)
    except OSError as error:
        raise GpuleaseError(
            f"cannot serve your jobs on {path}: {error.strerror}",
            "set XDG_RUNTIME_DIR to a directory of your own with a shorter path",
        ) from error


def ssh_line(path: str) -> str:
    """Return the command that connects a port of the user's own machine to a Unix socket here."""
    from gpulease.peer_credentials import user_name

    return f"ssh -L 8080:{path} {user_name(os.geteuid())}@{socket.gethostname()}"


def user_of_peer(connection: socket.socket) -> int | None:
    """Return the uid of the other end of a connection on loopback; None is unknown.

    The kernel's table has the owner of each socket. A connection that a client has closed is not
    in it, or has the uid 0.
    """
    wanted = _entry(connection.getpeername()), _entry(connection.getsockname())
    with _TABLE.open(encoding="ascii") as table:
        for columns in map(str.split, table):
            if (columns[_LOCAL], columns[_REMOTE]) == wanted:
                return int(columns[_UID])
    return None


def _entry(address: tuple[str, int]) -> str:
    # The four bytes stand as a number in the byte order of this machine.
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


def is_on_loopback(listening: socket.socket) -> bool:
    """Tell whether only this machine can connect, by IP."""
    is_unix = listening.family == socket.AF_UNIX
    return not is_unix and ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def shown(listening: socket.socket) -> str:
    """Write where a socket listens."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def is_passed() -> bool:
    """Tell whether systemd has opened the socket for this process; see sd_listen_fds(3)."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def _passed() -> socket.socket:
    try:
        passed = socket.socket(fileno=_FIRST_PASSED)
        is_listening = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        is_listening = 0
    if not is_listening:
        raise BadConfiguration(
            "cannot serve your jobs: LISTEN_PID says that systemd has opened a socket, and "
            f"descriptor {_FIRST_PASSED} is none that listens",
            "a .socket unit with Accept=no opens it; from a terminal, unset LISTEN_PID",
        )
    if passed.family != socket.AF_UNIX:
        raise BadConfiguration(
            "cannot serve your jobs on a port that systemd has opened: all users could connect",
            "ListenStream= names a Unix socket, which SocketMode= protects",
        )
    return passed


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
        tried.connect(str(path))
        return True
    return False


def _listen_on_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # Connections inherit it. It ends those to browsers that stopped reading, too.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return listening


def _listen_on_path(path: Path, mode: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    if path.is_socket():
        path.unlink()  # of a process that was killed
    try:
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        path.chmod(mode)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
