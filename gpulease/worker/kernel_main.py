"""A Python kernel for Jupyter that runs as a job. Standard library and ipykernel only.

Usage: python kernel_main.py IDLE_SECONDS ipykernel's arguments; 0: never idle

It runs in any Python that has ipykernel.
"""

import glob
import json
import os
import signal
import sys
import threading
import time

EXIT_WITHIN = 30.0
"""Seconds for the Jupyter server to end this kernel."""


class IdleWatch:
    """Ends the kernel when it has executed nothing for some time."""

    def __init__(self, seconds, connection_file, server):
        self.seconds = seconds
        self.connection_file = connection_file
        self.server = server  # the pid of the Jupyter server, or ""
        self.last = time.monotonic()
        self.executing = False

    def start(self, shell):
        shell.events.register("pre_execute", self.begin)
        shell.events.register("post_execute", self.end)
        threading.Thread(target=self.run, name="gpulease-idle", daemon=True).start()

    def begin(self):
        self.executing = True

    def end(self):
        self.last, self.executing = time.monotonic(), False

    def run(self):
        while True:
            left = self.last + self.seconds - time.monotonic()
            if left <= 0 and not self.executing:
                break
            time.sleep(max(min(left, self.seconds), 0.1))
        sys.__stderr__.write("gpulease: the kernel executed nothing for %gs\n" % self.seconds)
        sys.__stderr__.flush()
        # Jupyter would start a kernel again that ends by itself, and with it the lease.
        if not delete_kernel(self.server, self.connection_file):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(EXIT_WITHIN)
        os.kill(os.getpid(), signal.SIGKILL)


def end_with(server):
    """End this kernel when the Jupyter server that started it has gone."""
    while not has_ended(server):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def has_ended(pid):
    """Return whether a process is gone or a zombie."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def delete_kernel(server, connection_file):
    """Ask the Jupyter server that started this kernel to end it; return whether it will."""
    from urllib.request import Request, urlopen

    from jupyter_core.paths import jupyter_runtime_dir

    name = os.path.basename(connection_file)
    if not name.startswith("kernel-"):
        return False
    kernel = os.path.splitext(name)[0][len("kernel-") :]
    for path in glob.glob(os.path.join(jupyter_runtime_dir(), "*server-%s.json" % (server or "-"))):
        try:
            with open(path) as file:
                found = json.load(file)
            request = Request(
                "%sapi/kernels/%s" % (found["url"], kernel),
                headers={"Authorization": "token %s" % found.get("token", "")},
                method="DELETE",
            )
            with urlopen(request, timeout=EXIT_WITHIN):
                return True
        except (OSError, ValueError, KeyError):
            continue
    return False


def main():
    """Run the kernel until Jupyter or the idle watch ends it."""
    seconds = float(sys.argv.pop(1))
    server = os.environ.get("JPY_PARENT_PID", "")
    # ipykernel ends when its parent has gone, which in a job is the shim.
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    # The folder of this file, in which the kernel would find modules that are not the user's.
    del sys.path[0]
    from ipykernel.kernelapp import IPKernelApp

    app = IPKernelApp.instance()
    app.initialize()
    if server.isdigit():
        # gpulease run does not notice, and a process that is killed ends none that it started.
        threading.Thread(target=end_with, args=(server,), daemon=True).start()
    if seconds:
        IdleWatch(seconds, app.abs_connection_file, server).start(app.shell)
    app.start()


if __name__ == "__main__":
    main()
