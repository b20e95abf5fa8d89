"""HTTP/1.1 over a Unix socket: one request on each connection, the reply whole or as it comes.

It knows no routes and no JSON. The standard library's client takes three times as long to import
as the interpreter takes to start.
"""

from __future__ import annotations

from _socket import SHUT_RDWR

from gpulease import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpulease.client.unix_socket import Link

_PIECE = 1 << 16
_LONGEST_HEAD = 1 << 16
"""Bytes of the status line and the headers."""
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class BadReply(OSError):
    """The reply ended too early, or is no HTTP."""


def quoted(text: str, safe: str = "") -> str:
    """Return text for a path or a query, percent-encoded (RFC 3986)."""
    kept = _UNRESERVED | frozenset(safe.encode())
    encoded = text.encode(errors="surrogateescape")
    return "".join(chr(byte) if byte in kept else f"%{byte:02X}" for byte in encoded)


def with_query(path: str, query: Mapping[str, str | None] | None) -> str:
    """Return a path with the values of a query that are not None."""
    given = [f"{key}={quoted(value)}" for key, value in (query or {}).items() if value is not None]
    return f"{path}?{'&'.join(given)}" if given else path


def request(
    link: Link,
    method: str,
    target: str,
    body: bytes | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Reply:
    """Send a request on a connected socket, and return its reply once the head is there.

    `meanwhile` is called once the request is sent.

    Raises:
        OSError: the connection failed, or was silent for longer than the socket's timeout.
    """
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: gpulease\r\nUser-Agent: gpulease/{__version__}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n\r\n"
    )
    try:
        link.sendall(head.encode() + (body or b""))
    except (BrokenPipeError, ConnectionResetError):
        pass  # a daemon that refuses the connection answers without reading the request
    if meanwhile is not None:
        meanwhile()
    reply = Reply(link)
    reply.read_head()
    return reply


class Reply:
    """A reply and its connection, which are closed together."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._received = b""
        """What has arrived and was not used yet."""
        self._left: int | None = None
        """Bytes of the body, or of its chunk, that are still to come; None: until the end."""
        self._is_chunked = False
        self.status = 0

    def settimeout(self, seconds: float | None) -> None:
        """Wait at most so many seconds for the next data."""
        self._link.settimeout(seconds)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def interrupt(self) -> None:
        """End the reply early, also while another thread reads it: that one gets `BadReply`."""
        try:
            self._link.shutdown(SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def read(self) -> bytes:
        """Return the whole body.

        Raises:
            OSError: the connection failed, was silent for too long, or ended too early.
        """
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            OSError: as `read`.
        """
        if self._is_chunked:
            while self._begin_chunk():
                yield from self._rest()
                self._line()
        else:
            yield from self._rest()

    def lines(self) -> Iterator[bytes]:
        """Yield each line of the body, without its end, as soon as it is there.

        Raises:
            OSError: as `read`.
        """
        incomplete = b""
        for piece in self.pieces():
            *complete, incomplete = (incomplete + piece).split(b"\n")
            for line in complete:
                yield line.strip()
        if incomplete:
            yield incomplete.strip()

    def read_head(self) -> None:
        """Read the status and the headers, and skip those of interim replies."""
        while self.status < 200:
            version, _, rest = self._line().partition(b" ")
            if not version.startswith(b"HTTP/1."):
                raise BadReply("the answer is no HTTP")
            self.status = _number(rest[:3])
            headers = self._headers()
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        if not self._is_chunked and b"content-length" in headers:
            self._left = _number(headers[b"content-length"])

    def _headers(self) -> dict[bytes, bytes]:
        headers: dict[bytes, bytes] = {}
        size = 0
        while line := self._line():
            size += len(line)
            if size > _LONGEST_HEAD:
                raise BadReply("the answer has too many headers")
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        return headers

    def _begin_chunk(self) -> bool:
        """Read the size of the next chunk; False at the end of the body, with its trailers read."""
        self._left = _number(self._line().partition(b";")[0].strip(), base=16)
        if self._left == 0:
            self._headers()
        return self._left > 0

    def _rest(self) -> Iterator[bytes]:
        """Yield what is left of the body or of its chunk."""
        while self._left != 0:
            piece = self._received or self._link.recv(_PIECE)
            self._received = b""
            if not piece:
                if self._left is None:
                    return
                raise BadReply("the answer is incomplete")
            if self._left is not None:
                piece, self._received = piece[: self._left], piece[self._left :]
                self._left -= len(piece)
            yield piece

    def _line(self) -> bytes:
        """Return the next line of the head, or between chunks, without its end."""
        while (end := self._received.find(b"\n")) < 0:
            piece = self._link.recv(_PIECE)
            if not piece or len(self._received) > _LONGEST_HEAD:
                raise BadReply("the answer is incomplete")
            self._received += piece
        line, self._received = self._received[:end], self._received[end + 1 :]
        return line.rstrip(b"\r")


def _number(text: bytes, base: int = 10) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise BadReply("the answer is no HTTP")
    return number
