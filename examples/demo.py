"""Demonstrate gpulease: start a daemon, train a network in a 4 GiB lease, and show the status.

Without an NVIDIA driver the two GPUs are simulated and TensorFlow computes on the CPU. Everything
else works as on a server with GPUs.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parent
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists()


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def gpulease(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpulease.cli", *arguments]


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "gpulease.daemon", "--state", str(folder / "state")]
    command += ["--socket", os.environ["GPULEASE_SOCKET"]]
    command += [] if HAS_DRIVER else ["--simulate", "2x8G"]
    say("$ " + " ".join(["gpuleased", *command[3:]]))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while subprocess.run(gpulease("status"), check=False, capture_output=True).returncode:
            if process.poll() is not None:
                sys.exit((folder / "log").read_text())
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    if not HAS_DRIVER:
        print("There is no NVIDIA driver on this machine, so this demo simulates two GPUs.")
    with tempfile.TemporaryDirectory(prefix="gpulease-demo-") as name:
        os.environ["GPULEASE_SOCKET"] = f"{name}/gpuleased.sock"
        # As after `source .venv/bin/activate`: scripts run under the Python that has TensorFlow.
        os.environ["VIRTUAL_ENV"] = sys.prefix
        with daemon(Path(name)):
            return show()


def show() -> int:
    say("$ gpulease run --mem 4G examples/digits.py")
    training = subprocess.Popen(
        gpulease("run", "--mem", "4G", "--name", "digits", str(EXAMPLES / "digits.py"))
    )
    # Wait some seconds into the training, so that there is something to show.
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.wait(12)
    say("$ gpulease status          (while it runs)")
    subprocess.run(gpulease("status"), check=True)
    print(flush=True)
    status = training.wait()
    say("$ gpulease show 1          (afterwards)")
    subprocess.run(gpulease("show", "1"), check=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
