"""Notebooks on real Jupyter packages: kernels as jobs, %gpulease, notebooks as jobs, JupyterHub."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from daemon_rig import PATIENCE_S, Daemon, alive, daemons, free_port, wait_for
from frameworks.environments import python_of
from goldens import mentions

REPOSITORY = Path(__file__).parents[2]
PLAIN = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Yield a daemon with two simulated GPUs of 8 GiB."""
    with daemons(tmp_path) as make:
        yield make(settings={"grace": "2s"}).start()


@pytest.fixture
def python() -> str:
    """Return the Python with Jupyter."""
    return python_of("jupyter")


class User:
    """A user whose Python has Jupyter, and whose gpulease is that of the tests."""

    def __init__(self, daemon: Daemon, python: str, folder: Path) -> None:
        self.folder, self.python = folder, python
        self.environment = PLAIN | {
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "GPULEASE_SOCKET": str(daemon.socket),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "IPYTHONDIR": str(folder / "ipython"),
            "TMPDIR": str(folder),
        }

    def gpulease(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "gpulease.cli", *words], env=self.environment, cwd=self.folder,
            capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done
        return done

    def start(self, script: str, **more: str) -> "subprocess.Popen[str]":
        """Start a script in the user's Python, where gpulease can be imported."""
        return subprocess.Popen(
            [self.python, "-c", START + dedent(script)], cwd=self.folder, text=True,
            env=self.environment | {"PYTHONPATH": str(REPOSITORY)} | more,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, script: str, **more: str) -> str:
        process = self.start(script, **more)
        try:
            output, errors = process.communicate(timeout=2 * PATIENCE_S)
        finally:
            process.kill()
        assert process.returncode == 0, errors
        return output


START = """\
import os, sys, time, signal, warnings
warnings.simplefilter("ignore")
def tell(*words): print(*words, flush=True)
def kernel(name):
    from jupyter_client.manager import start_new_kernel
    return start_new_kernel(kernel_name=name, startup_timeout=120)
def printed(client, code, until=None, then=None):
    texts = []
    def hook(message):
        nonlocal until
        content = message["content"]
        texts.append(content.get("text") or content.get("ename") or "")
        if until and until in "".join(texts):
            until = None
            then()
    client.execute_interactive(code, output_hook=hook, timeout=120)
    return "".join(texts).strip()
"""


@pytest.fixture
def user(daemon: Daemon, python: str, tmp_path: Path) -> User:
    """Return a user of that daemon."""
    folder = tmp_path / "user"
    folder.mkdir()
    return User(daemon, python, folder)


def kernel_spec(user: User, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (user.folder / "data" / "kernels" / name / "kernel.json").read_text()
    )
    return found


def test_a_kernel_is_a_job_as_long_as_jupyter_keeps_it(daemon: Daemon, user: User) -> None:
    installed = user.gpulease("kernel", "install", "--mem", "3G", "--", "--gpus", "2")
    assert installed.stdout == "gpulease-3g\n"
    shown = user.run(
        """\
        manager, client = kernel("gpulease-3g")
        tell(printed(client, "from os import environ as e; "
                     "print(e['GPULEASE_JOB'], e['GPULEASE_MEMORY'])"))
        tell(printed(client, "import sys; print(sys.prefix)"))
        manager.restart_kernel()
        client.wait_for_ready(60)
        tell(printed(client, "e"), printed(client, "import os; print(os.getenv('GPULEASE_JOB'))"))
        client.stop_channels()
        manager.shutdown_kernel()
        """
    )
    assert shown.splitlines() == [
        f"1 {3 * 2**30}", str(Path(user.python).parents[1]), "NameError 2",
    ]  # fmt: skip
    first, second = (daemon.wait_until(number, "ended") for number in (1, 2))
    assert first["name"] == second["name"] == "gpulease-3g"
    assert [lease["memory"] for lease in first["leases"]] == [3 * 2**30] * 2


def test_an_interrupt_reaches_the_kernel_and_two_of_them_do_not_end_it(
    daemon: Daemon, user: User
) -> None:
    user.gpulease("kernel", "install", "--mem", "1G", "--name", "one")
    shown = user.run(
        """\
        manager, client = kernel("one")
        cell = "import time\\nprint('up', flush=True)\\nfor _ in range(600): time.sleep(0.1)"
        # Each in a cell that sleeps: between two cells, Jupyter's own loop would take it.
        for _ in range(2): tell(printed(client, cell, "up\\n", manager.interrupt_kernel))
        tell(printed(client, "print('alive')"))
        client.stop_channels()
        manager.shutdown_kernel()
        """
    )
    assert shown == "up\nKeyboardInterrupt\n" * 2 + "alive\n"
    assert daemon.wait_until(1, "ended")


def test_a_kernel_ends_with_the_process_that_jupyter_started(daemon: Daemon, user: User) -> None:
    user.gpulease("kernel", "install", "--mem", "1G", "--name", "one")
    shown = user.run(
        """\
        manager, client = kernel("one")
        tell(printed(client, "import os; print(os.getpid())"))
        client.stop_channels()
        os.kill(manager.provisioner.process.pid, signal.SIGKILL)
        """
    )
    pid = int(shown)
    assert daemon.wait_until(1, "ended")["outcome"] == "cancelled"
    assert not alive([pid])


def test_a_kernel_that_waits_leaves_the_queue_when_it_is_shut_down(
    daemon: Daemon, user: User
) -> None:
    user.gpulease("kernel", "install", "--mem", "8G", "--name", "all")
    blocker = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "600")
    shown = user.run(
        """\
        from jupyter_client.manager import KernelManager
        manager = KernelManager(kernel_name="all")
        manager.start_kernel()
        import gpulease
        while len(gpulease.Client().jobs().jobs) < 2: time.sleep(0.05)
        tell(manager.is_alive())
        manager.shutdown_kernel()
        """
    )
    assert shown == "True\n"
    assert daemon.wait_until(blocker + 1, "ended")["started_at"] is None


def test_an_idle_kernel_ends_and_a_busy_one_does_not(daemon: Daemon, user: User) -> None:
    user.gpulease("kernel", "install", "--mem", "1G", "--name", "one", "--idle", "4s")
    shown = user.run(
        """\
        manager, client = kernel("one")
        tell(printed(client, "import time; time.sleep(6); print('done')"))
        started = time.monotonic()
        while manager.is_alive(): time.sleep(0.1)
        tell(3 < time.monotonic() - started < 30)
        """
    )
    assert shown == "done\nTrue\n"
    assert daemon.wait_until(1, "ended")


SERVER = """\
import json, urllib.request
def ask(path, body=None):
    request = urllib.request.Request(
        os.environ["URL"] + path, body, {"Authorization": "token secret"})
    for _ in range(100):
        try:
            return json.load(urllib.request.urlopen(request))
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server does not answer")
"""


@contextmanager
def jupyter_server(user: User, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a Jupyter server for the scripts of the user that begin with SERVER."""
    server = subprocess.Popen(
        [user.python, "-m", "jupyter_server", "--allow-root", "--no-browser", "--port=0",
         "--IdentityProvider.token=secret", *options],
        env=user.environment, cwd=user.folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        found = user.folder / "runtime" / f"jpserver-{server.pid}.json"
        wait_for("the server listens", lambda: found.exists() and found.read_text())
        user.environment["URL"] = json.loads(found.read_text())["url"]
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)


def test_a_jupyter_server_does_not_start_an_idle_kernel_again(daemon: Daemon, user: User) -> None:
    user.gpulease("kernel", "install", "--mem", "1G", "--name", "one", "--idle", "3s")
    with jupyter_server(user):
        shown = user.run(
            SERVER
            + """\
ask("api/kernels", b'{"name": "one"}')
while ask("api/kernels"): time.sleep(0.2)
tell("gone")
"""
        )
        assert shown == "gone\n"
        assert daemon.wait_until(1, "ended")
        assert len(daemon.jobs()) == 1


def test_a_kernel_ends_when_its_server_is_killed(daemon: Daemon, user: User) -> None:
    user.gpulease("kernel", "install", "--mem", "1G", "--name", "one")
    with jupyter_server(user) as server:
        user.run(SERVER + """ask("api/kernels", b'{"name": "one"}')""")
        daemon.wait_until(1, "active")
        server.kill()
        assert daemon.wait_until(1, "ended")


def test_a_jupyter_server_keeps_a_kernel_that_waits_for_longer_than_its_timeout(
    daemon: Daemon, user: User
) -> None:
    user.gpulease("kernel", "install", "--mem", "8G", "--name", "all")
    blocker = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "600")
    with jupyter_server(user, "--MappingKernelManager.kernel_info_timeout=2"):
        shown = user.run(
            SERVER
            + f"""\
import gpulease
from jupyter_client import BlockingKernelClient
made = ask("api/kernels", b'{{"name": "all"}}')
time.sleep(6)
tell(len(ask("api/kernels")))
gpulease.Client().cancel({blocker})
name = "kernel-%s.json" % made["id"]
path = os.path.join(os.environ["JUPYTER_RUNTIME_DIR"], name)
while True:
    client = BlockingKernelClient(connection_file=path)
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(60)
    except RuntimeError:  # no heartbeat within a second: the kernel is only starting
        client.stop_channels()
    else:
        break
tell(printed(client, "print(7)"), len(ask("api/kernels")))
client.stop_channels()
"""
        )
        assert shown == "1\n7 1\n"
        assert daemon.job(blocker + 1)["state"] == "active"


def test_kernels_are_listed_and_removed(user: User, tmp_path: Path) -> None:
    user.gpulease("kernel", "install", "--mem", "40%", "--time", "8h", "--idle", "30m")
    user.gpulease("kernel", "install", "--mem", "4G", "--prefix", str(tmp_path / "other"))
    spec = kernel_spec(user, "gpulease-40-percent")
    assert mentions(spec["display_name"], "Python 3.11", "40%")
    assert spec["interrupt_mode"] == "message"
    listed = user.gpulease("kernel", "list").stdout
    assert mentions(listed, "gpulease-40-percent", "--mem 40% --time 8h")
    assert "4g" not in listed
    other = user.gpulease("kernel", "list", "--prefix", str(tmp_path / "other")).stdout
    assert mentions(other, "gpulease-4g")
    user.gpulease("kernel", "remove", "gpulease-40-percent")
    assert user.gpulease("kernel", "list").stdout == ""
    refused = user.gpulease("kernel", "remove", "python3", check=False)
    assert refused.returncode == 2 and mentions(refused.stderr, "python3")


def test_the_magic_leases_for_the_kernel_of_the_notebook(daemon: Daemon, user: User) -> None:
    shown = user.run(
        """\
        manager, client = kernel("python3")
        for line in ("%load_ext gpulease", "%gpulease", "%gpulease 2G --gpus 2 --time 8h --name nb",
                     "%gpulease", "%gpulease 2G --gpus 2 --time 8h --name nb", "%gpulease 4G",
                     "%gpulease release", "%gpulease", "%gpulease 4G --what"):
            tell(printed(client, line).replace("\\n", " "))
        client.stop_channels()
        manager.shutdown_kernel()
        """
    )
    lines = shown.splitlines()
    assert lines[1].startswith("no lease")
    assert lines[2] == lines[3] == lines[4] == "job 1: 2G on each of 2 GPUs"
    assert mentions(lines[5], "UsageError") and mentions(lines[8], "UsageError")
    assert lines[6].startswith("no lease") and lines[7].startswith("no lease")
    job = daemon.job(1)
    assert (job["name"], job["kind"], job["claim"]["time_limit"]) == ("nb", "hold", 8 * 3600)


def test_the_magic_says_why_it_waits_and_an_interrupt_leaves_the_queue(
    daemon: Daemon, user: User
) -> None:
    blocker = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "600")
    shown = user.run(
        """\
        manager, client = kernel("python3")
        printed(client, "%load_ext gpulease")
        said = printed(client, "%gpulease 8G", "waits", manager.interrupt_kernel)
        tell(said.replace("\\n", " "))
        client.stop_channels()
        manager.shutdown_kernel()
        """
    )
    assert mentions(shown, f"job {blocker + 1} waits", "KeyboardInterrupt")
    assert daemon.wait_until(blocker + 1, "ended")["outcome"] == "cancelled"


def notebook(path: Path, *cells: str) -> None:
    kinds = [
        {"cell_type": "code", "execution_count": None, "id": f"c{number}", "metadata": {},
         "outputs": [], "source": cell}
        for number, cell in enumerate(cells)
    ]  # fmt: skip
    path.write_text(
        json.dumps({"cells": kinds, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )


def outputs(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(each.get("text", "")) for cell in cells for each in cell["outputs"]]


def test_a_notebook_is_executed_as_a_job(daemon: Daemon, user: User) -> None:
    path = user.folder / "train.ipynb"
    notebook(path, "import os\nprint(os.environ['GPULEASE_MEMORY'])", "print('second')")
    done = user.gpulease("run", "--mem", "2G", "train.ipynb")
    assert done.stdout == f"{2 * 2**30}\nsecond\n"
    assert outputs(user.folder / "train.out.ipynb") == [f"{2 * 2**30}\n", "second\n"]
    assert outputs(path) == []
    # The command returns as soon as the job's program has ended, before the daemon has seen it.
    job = daemon.wait_until(1, "ended")
    assert job["exit_status"] == 0 and mentions(job["command"], "train.ipynb")


def test_a_notebook_that_fails_keeps_what_it_has_done(daemon: Daemon, user: User) -> None:
    notebook(user.folder / "train.ipynb", "print('first')", "1 / 0", "print('never')")
    done = user.gpulease("run", "--mem", "2G", "train.ipynb", "-o", "mine.ipynb", check=False)
    assert done.returncode == 1
    assert mentions(done.stderr, "ZeroDivisionError", "mine.ipynb")
    assert outputs(user.folder / "mine.ipynb")[0] == "first\n"


def test_what_a_notebook_cannot_run_with_is_refused_in_one_line(daemon: Daemon, user: User) -> None:
    path = user.folder / "train.ipynb"
    notebook(path, "1")
    for words in (["-p", "rate", "0.1"], ["--outptu", "x.ipynb"]):
        done = user.gpulease("run", "--mem", "2G", "train.ipynb", *words, check=False)
        assert done.returncode == 2 and mentions(done.stderr, "--output", "papermill")
    missing = user.gpulease("run", "--mem", "2G", "nosuch.ipynb", check=False)
    assert missing.returncode == 127 and mentions(missing.stderr, "no such file in")
    assert daemon.jobs() == []
    content = json.loads(path.read_text())
    content["metadata"] = {"kernelspec": {"name": "nokernel", "display_name": "none"}}
    path.write_text(json.dumps(content))
    done = user.gpulease("run", "--mem", "2G", "train.ipynb", check=False)
    assert done.returncode == 1 and mentions(done.stderr, "nokernel")
    assert "Traceback" not in done.stderr
    assert not (user.folder / "train.out.ipynb").exists()


def test_without_nbclient_a_notebook_is_refused_with_what_is_missing(
    daemon: Daemon, user: User
) -> None:
    notebook(user.folder / "train.ipynb", "1")
    user.environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = user.gpulease("run", "--mem", "2G", "train.ipynb", check=False)
    assert done.returncode == 126
    assert mentions(done.stderr, "nbclient", "pip install")
    assert daemon.jobs() == []


HUB = """\
import os, runpy, sys
from jupyterhub.proxy import Proxy

class NoProxy(Proxy):
    should_start = False
    routes = {}
    async def add_route(self, routespec, target, data): self.routes[routespec] = data
    async def delete_route(self, routespec): self.routes.pop(routespec, None)
    async def get_all_routes(self):
        return {spec: {"routespec": spec, "target": "", "data": data}
                for spec, data in self.routes.items()}

exec(open(os.environ["EXAMPLE"]).read())
c.JupyterHub.proxy_class = NoProxy
c.JupyterHub.hub_port = int(os.environ["HUB_PORT"])
c.JupyterHub.hub_connect_ip = "127.0.0.1"
c.JupyterHub.db_url = "sqlite:///" + os.path.join(os.environ["TMPDIR"], "hub.sqlite")
c.JupyterHub.cookie_secret_file = os.path.join(os.environ["TMPDIR"], "cookie")
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.services = [{"name": "test", "api_token": "secret-of-the-test"}]
c.JupyterHub.load_roles = [
    {"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers"]}]
c.GpuleaseSpawner.gpulease = os.environ["GPULEASE"]
c.Spawner.args = ["--allow-root"]
c.Spawner.environment = {"GPULEASE_SOCKET": os.environ["GPULEASE_SOCKET"]}
c.Spawner.notebook_dir = os.environ["TMPDIR"]
"""
ASK_HUB = """
import getpass, json, urllib.request
def ask(method, path="", body=None):
    request = urllib.request.Request(
        "http://127.0.0.1:%s/hub/api/users/%s%s" % (
            os.environ["HUB_PORT"], getpass.getuser(), path),
        body, {"Authorization": "token secret-of-the-test"}, method=method)
    return json.loads(urllib.request.urlopen(request, timeout=120).read() or b"{}")
def until(condition):
    for _ in range(600):
        try:
            if condition(): return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("never happened")
until(lambda: ask("POST"))
ask("POST", "/server", b'{"memory": "3G"}')
until(lambda: ask("GET")["servers"].get("", {}).get("ready"))
tell("ready")
input()
ask("DELETE", "/server")
until(lambda: not ask("GET")["servers"])
tell("stopped")
"""


def test_jupyterhub_starts_a_users_server_as_a_job(daemon: Daemon, user: User) -> None:
    (user.folder / "config.py").write_text(HUB)
    user.environment |= {
        "EXAMPLE": str(REPOSITORY / "examples" / "jupyterhub_config.py"),
        "GPULEASE": str(Path(sys.executable).parent / "gpulease"),
        "HUB_PORT": str(free_port()),
    }
    log = user.folder / "hub.log"
    with log.open("w") as file:
        hub = subprocess.Popen(
            [user.python, "-m", "jupyterhub", "-f", "config.py"], env=user.environment,
            cwd=user.folder, stdout=file, stderr=file,
        )  # fmt: skip
    client = user.start(ASK_HUB)
    assert client.stdin is not None and client.stdout is not None
    try:
        assert client.stdout.readline() == "ready\n", log.read_text()
        job = daemon.job(1)
        assert (job["name"], job["state"]) == ("jupyterhub", "active")
        assert job["leases"][0]["memory"] == 3 * 2**30
        output, errors = client.communicate("\n", timeout=PATIENCE_S)
        assert output == "stopped\n", errors
        daemon.wait_until(1, "ended")
    finally:
        client.kill()
        client.communicate()
        hub.send_signal(signal.SIGTERM)
        hub.wait(PATIENCE_S)
