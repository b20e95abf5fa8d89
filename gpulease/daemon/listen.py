"""The socket on which the daemon listens."""

import errno
import os
import socket
from pathlib import Path

from gpulease.daemon.state import make_directories
from gpulease.errors import BadConfiguration
from gpulease.footing import shaky
from gpulease.server.entrance import BACKLOG

_LONGEST_PATH = 107
"""Bytes of a Unix socket's path, see unix(7); one more is its final NUL."""


def listen(path: Path, *, to_all: bool) -> socket.socket:
    """Return a socket that listens at `path`; every local user may connect if `to_all`.

    Raises:
        BadConfiguration: the path cannot be used, or another daemon listens there.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise BadConfiguration(
            f"cannot listen on {path}: the path is {len(os.fsencode(path))} bytes long, "
            f"and a socket's is at most {_LONGEST_PATH}",
            "give a shorter one with --socket, such as /run/gpulease/gpuleased.sock",
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_parent(path, to_all=to_all)
        _remove_stale(path)
        listening.bind(str(path))
        path.chmod(0o666 if to_all else 0o600)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise BadConfiguration(
            f"cannot listen on {path}: {error.strerror or error}",
            "give a path in a directory that this user can write with --socket",
        ) from error
    except BadConfiguration:
        listening.close()
        raise
    return listening


def _make_parent(path: Path, *, to_all: bool) -> None:
    parent = path.parent
    if not (to_all and shaky(parent, os.geteuid())):
        make_directories(parent, 0o755 if to_all else 0o700)
    # Root could listen in anybody's place anyway: a user's socket may lie in /tmp itself.
    is_roots = not to_all and parent.lstat().st_uid == parent.stat().st_uid == 0
    if not is_roots and (why := shaky(parent, os.geteuid())):
        raise BadConfiguration(
            f"cannot listen on {path}: {why}",
            "whoever may write there could listen in our place: give another path with --socket",
        )


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on any more; nothing else is ever removed."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise FileExistsError(errno.EEXIST, "a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass
    raise BadConfiguration(
        f"cannot listen on {path}: another daemon does",
        "stop it first, or give another path with --socket",
    )
