"""Show what gpulease does: share a GPU, queue what does not fit, stop a job that takes too much.

    python examples/demo.py               on two simulated GPUs, without any framework
    python examples/demo.py tensorflow    train a network in a lease, on a GPU where there is one

On simulated GPUs a job's resident memory counts as its GPU memory. The daemon, the queue and the
processes of the jobs are the same as on a server with GPUs.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpulease import Client

DIGITS = Path(__file__).with_name("digits.py")
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists()
SOON_S = 30.0
"""For what the demo waits for; it takes a second or two."""

TRAIN = """
import sys, time

memory = bytearray(int(float(sys.argv[1]) * 2**30))
time.sleep(60)
"""


def say(text: str) -> None:
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


def gpulease(*arguments: str) -> int:
    say("$ gpulease " + " ".join(arguments))
    return subprocess.run(
        [sys.executable, "-m", "gpulease.cli", *arguments], check=False
    ).returncode


@contextlib.contextmanager
def daemon(folder: Path, simulated: bool) -> Iterator[Client]:
    """Start a daemon of this demo's own, and cancel its jobs and stop it in the end."""
    socket = folder / "gpuleased.sock"
    (folder / "config.toml").write_text('overuse_grace = "3s"\n', encoding="utf-8")
    command = [sys.executable, "-m", "gpulease.daemon", "--state", str(folder / "state")]
    command += ["--socket", str(socket), "--config", str(folder / "config.toml")]
    command += ["--simulate", "2x8G"] if simulated else []
    os.environ["GPULEASE_SOCKET"] = str(socket)
    # As after `source .venv/bin/activate`: scripts run under the Python of the environment.
    os.environ["VIRTUAL_ENV"] = sys.prefix
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: socket.exists() or process.poll() is not None)
        if process.poll() is not None:
            sys.exit((folder / "log").read_text(encoding="utf-8"))
        client = Client(socket)
        yield client
        for job in client.jobs().jobs:
            client.cancel(job.id, grace=0)
        wait_for(lambda: not client.jobs().jobs)
    finally:
        process.terminate()
        process.wait()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


def share_and_queue(client: Client) -> int:
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    say("\n# Three jobs lease parts of two GPUs of 8G. A fourth does not fit, and waits.")
    for line in (
        "--mem 5G --time 20m --name bert train.py 0.8",
        "--mem 6G --time 10m --name vit train.py 1",
        "--mem 2G --name tune train.py 0.4",
        "--mem 6G --name next train.py 0.6",
    ):
        if gpulease("run", "-d", *line.split()):
            return 1
    wait_for(lambda: used(client) > 2.2 * 2**30)
    gpulease("status")

    say("\n# A job that takes more than its lease is stopped after a notice (here of 3 seconds).")
    gpulease("run", "--mem", "500M", "train.py", "0.9")

    say("\n# When a job ends, the next one starts.")
    gpulease("cancel", "vit")
    wait_for(
        lambda: any(job.name == "next" and job.state == "active" for job in client.jobs().jobs)
    )
    gpulease("list")
    return 0


def used(client: Client) -> int:
    """Give the bytes that all jobs use together."""
    return sum(lease.used or 0 for job in client.jobs().jobs for lease in job.leases)


def train_a_network(client: Client) -> int:
    say("$ gpulease run --mem 4G --name digits examples/digits.py")
    training = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gpulease.cli",
            "run",
            "--mem",
            "4G",
            "--name",
            "digits",
            str(DIGITS),
        ]
    )
    wait_for(lambda: used(client) > 2**27 or training.poll() is not None)
    gpulease("status")
    status = training.wait()
    gpulease("show", "digits")
    return status


def main() -> int:
    trains = sys.argv[1:] == ["tensorflow"]
    simulated = not (trains and HAS_DRIVER)
    if simulated:
        print("Two GPUs of 8G are simulated, and memory of processes counts as memory of GPUs.")
    with tempfile.TemporaryDirectory(prefix="gpulease-demo-") as folder:
        os.chdir(folder)
        with daemon(Path(folder), simulated) as client:
            status = train_a_network(client) if trains else share_and_queue(client)
    if not trains:
        say("\n# Next: docs/quickstart.md, or make demo-tensorflow, which trains a network.")
    return status


if __name__ == "__main__":
    sys.exit(main())
