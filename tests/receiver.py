"""A receiver of notifications on loopback, for Apprise's json:// URLs."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps what it gets. While it is `closed`, it does not answer; `refuses` fail first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, str]] = []
        """Title and body of each message, as it arrived."""
        self.kinds: list[str] = []
        """What Apprise takes each message for: "info", "failure", ..."""
        self.refuses = 0
        self.open = threading.Event()
        self.open.set()
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.server_address[1]}"

    @property
    def titles(self) -> list[str]:
        """The titles without the name of this machine."""
        return [title.partition(": ")[2] for title, _ in self.got]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.refuses:
            self.server.refuses -= 1
            self.send_response(503)
        else:
            self.server.kinds.append(said["type"])
            self.server.got.append((said["title"], said["message"]))
            while not self.server.open.wait(0.05) and not self.server.is_over.is_set():
                pass
            self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Yield a receiver that listens."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.is_over.set()
            receiver.shutdown()
            thread.join()
