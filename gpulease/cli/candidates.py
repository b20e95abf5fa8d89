"""What a shell may complete that only the daemon knows: jobs and GPUs, one on a line.

`gpulease __complete jobs cancel` is called by the completion scripts at every press of Tab. So it
imports next to nothing, gives the daemon little time, never starts one, and where anything at all
goes wrong it says nothing.
"""

import json
import os
import pwd
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpulease import config

_WITHIN_S = 1.0
_MOST = 100
"""Jobs that are offered, the newest of those that fit what was typed."""
_CREDENTIALS = struct.Struct("3i")
_LIVE = frozenset({"queued", "granted", "active", "releasing"})
_STATES = {
    "attach": frozenset({"granted", "active", "releasing"}),
    "show": _LIVE | {"ended"},
    "keep": frozenset({"granted", "active"}),
    "logs": frozenset({"active", "releasing", "ended"}),
}
"""The states of the jobs that a verb can do something with; of the other verbs, those that live."""
_OF_ANYBODY = frozenset({"show"})


def answer(words: Sequence[str]) -> None:
    """Print what may stand for `words`: "jobs VERB TYPED [SOCKET]" or "gpus TYPED [SOCKET]"."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(list(words))))
        sys.stdout.flush()
    except (OSError, ValueError, LookupError, TypeError):
        return


def _lines(words: list[str]) -> Iterator[str]:
    match words:
        case ["jobs", verb, typed, *named]:
            yield from _jobs(verb, typed, named)
        case ["gpus", typed, *named]:
            yield from _gpus(typed, named)
        case _:
            return


def _jobs(verb: str, typed: str, named: list[str]) -> Iterator[str]:
    states = _STATES.get(verb, _LIVE)
    everything = "?all=true" if "ended" in states else ""
    fitting = [
        job
        for job in _ask(f"/jobs{everything}", named)["jobs"]
        if job["state"] in states and _concerns(job, verb) and str(job["id"]).startswith(typed)
    ]
    for job in fitting[-_MOST:]:
        how = job["state"] if job["state"] != "ended" else job["outcome"] or "ended"
        yield f"{job['id']}\t{_clean(job['name'])}, {_spoken(how)}, {_clean(job['user'])}"


def _concerns(job: dict[str, Any], verb: str) -> bool:
    """Tell whether the caller may do that to the job; admins type the number."""
    uid = os.geteuid()
    return uid == 0 or verb in _OF_ANYBODY or job["user"] == pwd.getpwuid(uid).pw_name


def _gpus(typed: str, named: list[str]) -> Iterator[str]:
    for gpu in _ask("/status", named)["gpus"]:
        index = gpu.get("label") or str(gpu["index"])
        if index.startswith(typed):
            yield f"{_clean(index)}\t{_clean(gpu['name'])}, {gpu['state']}"


def _spoken(name: str) -> str:
    # As gpulease.wire does it, without what that imports.
    return name.replace("_", "-")


def _clean(text: str) -> str:
    # As cli.text does it, without what that imports.
    return "".join(char if char.isprintable() else "?" for char in text)


def _ask(target: str, named: list[str]) -> Any:
    """Return the answer of the first daemon that gives one.

    Raises:
        OSError: none does, in time.
    """
    given = Path(named[0]).expanduser() if named and named[0] else None
    candidates = config.candidate_sockets(given)
    # As cli.connect has it: only --socket may lead to the daemon of another user.
    trusted = None if given is not None else {0, os.geteuid()}
    for path in candidates:
        try:
            return json.loads(_get(path, target, trusted))
        except OSError:
            continue
    raise ConnectionError("no daemon answers")


def _get(path: Path, target: str, trusted: set[int] | None) -> bytes:
    # http.client would take longer to import than all of this takes.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_WITHIN_S)
        link.connect(str(path))
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if trusted is not None and _CREDENTIALS.unpack(peer)[1] not in trusted:
            raise PermissionError("the socket belongs to someone else")
        link.sendall(f"GET /v1{target} HTTP/1.0\r\nHost: gpulease\r\n\r\n".encode())
        whole = bytearray()
        while piece := link.recv(1 << 16):
            whole += piece
    head, _, body = bytes(whole).partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise ConnectionError("it refuses")
    return body
