"""`gpulease.lease` and frameworks: before their first use, after it, and never."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from daemon_rig import Daemon
from e2e.python_process import Process, environment, refusal, run

tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "hold_notebook.py"
DRIVER = """
static int started;
int cuInit(unsigned flags) { (void) flags; started = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!started) return 3; *count = 2; return 0; }
"""


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """Return a stand-in for the driver's library, which knows whether it was started."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the stand-in for CUDA with")
    (tmp_path / "cuda.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, "-o", library, tmp_path / "cuda.c"], check=True)
    return library


def jobs(daemon: Daemon) -> int:
    return len(daemon.jobs())


def test_once_cuda_has_started_a_lease_comes_too_late(daemon: Daemon, cuda: Path) -> None:
    script = f"""
import ctypes
cuda = ctypes.CDLL({str(cuda)!r})
gpulease.lease("1G").release()  # loaded is not started
cuda.cuInit(0)
"""
    told = run(daemon, script + refusal("AlreadyClaimed"))
    assert "CUDA" in told
    assert jobs(daemon) == 1, "nothing was asked for"


def test_a_lease_that_was_used_stays_until_the_process_ends(daemon: Daemon, cuda: Path) -> None:
    script = f"""
import ctypes
with gpulease.lease("1G") as lease:
    ctypes.CDLL({str(cuda)!r}).cuInit(0)
lease.release()
tell(lease.held, "GPULEASE_JOB" in os.environ)
"""
    process = Process(daemon, script + refusal("AlreadyLeased") + "input()")
    assert process.told() == "True True"
    assert daemon.job(1)["state"] == "active"
    _, err = process.end()
    assert len(re.findall("LeaseKept: .*job 1.*CUDA", err)) == 1
    assert daemon.wait_until(1, "ended")["outcome"] == "released"


def test_the_warning_points_at_the_line_that_released(daemon: Daemon, cuda: Path) -> None:
    told = run(
        daemon,
        f"""\
        import ctypes, warnings
        def lines(caught): return [(each.category.__name__, each.filename) for each in caught]
        with warnings.catch_warnings(record=True) as caught:
            with gpulease.lease("1G"):
                ctypes.CDLL({str(cuda)!r}).cuInit(0)
        tell(lines(caught))
        """,
    )
    assert told == "[('LeaseKept', '<string>')]\n"


@tensorflow
@pytest.mark.tensorflow
def test_tensorflow_imported_before_or_in_the_block_sees_the_lease(daemon: Daemon) -> None:
    block = """
with gpulease.lease("2G", gpus=2):
    import tensorflow as tf
    tell(len(tf.config.list_logical_devices()))
"""
    for before in ("", "import tensorflow\n"):
        assert run(daemon, before + block) == "2\n", before


@tensorflow
@pytest.mark.tensorflow
def test_tensorflow_is_as_it_was_after_a_lease_that_it_did_not_use(daemon: Daemon) -> None:
    told = run(
        daemon,
        """\
        import tensorflow as tf
        from tensorflow.python.client import device_lib, session
        from tensorflow.python.eager import context
        from tensorflow.python.training import server_lib
        def entrances():
            return [
                vars(context.Context)["config"], session.BaseSession.__init__,
                server_lib.Server.__init__, device_lib.list_local_devices,
            ]
        before = entrances()
        with gpulease.lease("2G", gpus=2, split=2) as first:
            assert not set(before) & set(entrances())
        assert entrances() == before and not first.held
        with gpulease.lease("2G", gpus=2) as second:
            tell(len(tf.config.list_logical_devices()))
        tell(second.held)
        """,
    )
    assert told.split() == ["2", "True"], "the second lease is in force, and not the first"


@tensorflow
@pytest.mark.tensorflow
def test_once_tensorflow_has_its_devices_a_lease_comes_too_late(daemon: Daemon) -> None:
    script = "import tensorflow as tf\ntf.config.list_physical_devices()\n"
    lease_and_use = 'gpulease.lease("1G").release()\ntf.constant(1) + 1\n'
    told = run(daemon, script + lease_and_use + refusal("AlreadyClaimed"))
    assert "TensorFlow" in told
    assert jobs(daemon) == 1, "nothing was asked for the second time"


@tensorflow
@pytest.mark.tensorflow
def test_the_notebook_learns_its_digits_in_its_lease(daemon: Daemon) -> None:
    ran = subprocess.run(
        [sys.executable, NOTEBOOK], env=environment(daemon), capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("<gpulease.Lease 1: 2G")
    accuracy = re.search(r"^test accuracy: (\S+)$", ran.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.93
    assert daemon.wait_until(1, "ended")["outcome"] == "released"
