"""A shim as the command sees it: a socket in the job's directory that speaks frames."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from gpulease.wire.frames import FrameKind, FrameReader, frame


class ShimStandIn:
    """Accepts one peer, keeps what it says, and says what a test tells it to."""

    def __init__(self, directory: Path, on_exit: Callable[[], None] | None = None) -> None:
        self.directory = directory
        self.on_exit = on_exit
        """Called when the job has ended, as a daemon hears of it."""
        self.stdin = b""
        self.stdin_ended = False
        self.signals: list[int] = []
        self.windows: list[tuple[int, int]] = []
        self.hello: dict[str, Any] | None = None
        self.gone = False
        """The peer has closed."""
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link: socket.socket | None = None
        here = os.open(directory, os.O_PATH)
        self._listener.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._link, self._listener):
            if each is not None:
                # Closing alone would not wake a thread that waits in accept or recv.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        for each in (self._link, self._listener):
            if each is not None:
                each.close()

    def say(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame once somebody has attached; blocks as long as they do not read."""
        self.until(lambda: self.hello is not None)
        assert self._link is not None
        self._link.sendall(frame(kind, payload))

    def tell(self, kind: FrameKind, **content: object) -> None:
        self.say(kind, json.dumps(content).encode())

    def exit(self, code: int | None = 0, signal: int | None = None, reason: str = "") -> None:
        how = {"exit_code": code} if signal is None else {"signal": signal}
        usual = "exited" if signal is None else "signaled"
        self.tell(FrameKind.EXITED, **how, reason=reason or usual)
        if self.on_exit is not None:
            self.on_exit()

    def exit_soon(self) -> None:
        """End the job once somebody has attached."""
        threading.Thread(target=self.exit, daemon=True).start()

    def hang_up(self) -> None:
        """Go without a word, as a shim that was killed."""
        self.until(lambda: self.hello is not None)
        assert self._link is not None
        self._link.shutdown(socket.SHUT_RDWR)

    def until(self, condition: object, within: float = 20.0) -> None:
        assert callable(condition)
        with self._changed:
            assert self._changed.wait_for(condition, within), "the command did not do it"

    def _serve(self) -> None:
        try:
            self._link, _ = self._listener.accept()
        except OSError:
            return
        frames = FrameReader()
        while piece := self._receive():
            for kind, payload in frames.feed(piece):
                with self._changed:
                    self._take(kind, payload)
                    self._changed.notify_all()
        with self._changed:
            self.gone = True
            self._changed.notify_all()

    def _receive(self) -> bytes:
        assert self._link is not None
        try:
            return self._link.recv(1 << 16)
        except OSError:
            return b""

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        match kind:
            case FrameKind.HELLO:
                self.hello = json.loads(payload)
            case FrameKind.STDIN:
                self.stdin += payload
            case FrameKind.STDIN_END:
                self.stdin_ended = True
            case FrameKind.WINDOW:
                window = json.loads(payload)
                self.windows.append((window["rows"], window["columns"]))
            case FrameKind.SIGNAL:
                self.signals.append(json.loads(payload)["signal"])
            case _:
                raise AssertionError(f"no peer should send {kind}")
