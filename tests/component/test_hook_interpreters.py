"""A hooked interpreter, of any version, behaves as the plain one does; a framework is hooked.

TensorFlow is a stand-in here: a package of a few lines with the names that the hook wraps.
Interpreters: this one, every python3.N on PATH, and those that GPULEASE_TEST_PYTHONS names
(paths with the separator of PATH between them).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from goldens import mentions
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB

LEASE = worker_environment(
    {"PATH": os.environ.get("PATH", os.defpath)},
    job="j1",
    marker="m",
    gpus=[LeasedGpu(f"GPU-{n}", n, "H100", 8192 * MIB, 81559 * MIB) for n in (3, 5)],
    simulated=False,
    driver=None,
    hooks=HOOKS,
    options=WorkerOptions(),
)
BOTH = "GPU-3,GPU-5"
SHARE = LEASE["XLA_PYTHON_CLIENT_MEM_FRACTION"]


def interpreters() -> list[str]:
    named = os.environ.get("GPULEASE_TEST_PYTHONS", "")
    on_path = [shutil.which(f"python3.{minor}") for minor in range(6, 16)]
    found = [sys.executable, *filter(None, named.split(os.pathsep)), *filter(None, on_path)]
    return [path for path in dict.fromkeys(found) if works(path)]


def works(path: str) -> bool:
    """Tell whether `path` runs: a version manager puts names on PATH that only complain."""
    try:
        probe = subprocess.run([path, "-c", ""], capture_output=True, timeout=30, check=False)
    except OSError:
        return False
    return probe.returncode == 0


def pyenvs(versions: str) -> list[str]:
    """Return the interpreters of pyenv that match, which are not on PATH."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    return [str(path) for path in sorted(root.glob(f"{versions}/bin/python")) if works(str(path))]


@pytest.fixture(params=interpreters(), ids=lambda path: "-".join(Path(path).parts[-3::2]))
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(
    python: str, *arguments: str, hooked: bool = True, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = LEASE if hooked else {"PATH": LEASE["PATH"]}
    path = [environment.get("PYTHONPATH"), variables.pop("PYTHONPATH", None)]
    environment = environment | variables | {"PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = ":".join(filter(None, path))
    return subprocess.run(
        [python, *arguments],
        env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def said(python: str, source: str, **options: Any) -> Any:
    """Return what a script prints as JSON; it must say nothing else."""
    child = run(python, "-c", dedent(source), **options)
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    return json.loads(child.stdout)


ABOUT_ITSELF = """
import json, os, sys
print(json.dumps([
    sys.argv, sys.path[1:], __name__, globals().get("__file__"), getattr(__spec__, "name", None),
    "sitecustomize" in sys.modules, type(os.environ).__name__, type(os.environ).__module__,
]))
"""


def both_ways(python: str, *arguments: str, **options: str) -> list[tuple[int, str, str]]:
    children = [run(python, *arguments, hooked=hooked, **options) for hooked in (False, True)]
    return [(child.returncode, child.stdout, child.stderr) for child in children]


def test_every_python_from_3_6_can_import_all_modules_of_the_hooks() -> None:
    names = sorted(path.stem for path in (HOOKS / "_gpulease_hooks").glob("*.py"))
    source = f"""
        import importlib, json, sys
        sys.path.insert(0, {str(HOOKS)!r})
        print(json.dumps([importlib.import_module("_gpulease_hooks." + name).__name__
                          for name in {names!r}]))
        """

    for python in {*interpreters(), *pyenvs("3.*")}:
        assert said(python, source) == [f"_gpulease_hooks.{name}" for name in names], python


@pytest.mark.parametrize("python", pyenvs("2.*"))
def test_python_2_runs_unhooked_and_in_silence(python: str) -> None:
    source = "import sys; print(['Gpulease' in str(each) for each in sys.meta_path])"

    assert run(python, "-c", source).stdout == "[]\n"


def test_a_script_finds_itself_as_in_a_plain_interpreter(python: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ABOUT_ITSELF)

    plain, hooked = both_ways(python, str(tmp_path / "script.py"), "--epochs", "3")

    assert hooked == plain
    assert plain[0] == 0


def test_a_module_and_standard_input_run_as_in_a_plain_interpreter(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "__init__.py").touch()
    (tmp_path / "pk" / "train.py").write_text(ABOUT_ITSELF)

    plain, hooked = both_ways(python, "-m", "pk.train", "x", PYTHONPATH=str(tmp_path))
    assert plain[0] == 0
    assert hooked == plain

    plain, hooked = both_ways(python, "-", "x", stdin=ABOUT_ITSELF)
    assert plain[0] == 0
    assert hooked == plain


SPAWNING = """
import json, multiprocessing, os, pickle, sys

class Thing:
    pass

def found(_):
    return [
        type(pickle.loads(pickle.dumps(Thing()))).__name__, os.environ.get("CUDA_VISIBLE_DEVICES"),
        any(type(f).__name__ == "GpuleaseFinder" for f in sys.meta_path), sys.path,
    ]

if __name__ == "__main__":
    answers = []
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            answers += pool.map(found, [0])
    print(json.dumps(answers))
"""


def test_child_processes_of_every_kind_are_hooked_and_unpickle_the_scripts_classes(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SPAWNING)

    children = [run(python, str(tmp_path / "script.py"), hooked=way) for way in (False, True)]

    plain, hooked = (json.loads(child.stdout) for child in children)
    assert [(name, path) for name, _, _, path in hooked] == [
        (name, path) for name, _, _, path in plain
    ]
    assert [(devices, is_hooked) for _, devices, is_hooked, _ in hooked] == [(BOTH, True)] * 3
    assert [is_hooked for _, _, is_hooked, _ in plain] == [False] * 3


@pytest.mark.parametrize(
    "source",
    [
        "import json; print(json.dumps('theirs'))",
        "raise ValueError('theirs is broken')",
        "import no_such_module_anywhere",
        "raise ImportError('odd', name='sitecustomize')",
        "import sys; sys.path.append('/theirs')",
        "def broken(:",
    ],
)
def test_the_sitecustomize_that_ours_shadows_acts_as_if_ours_were_not_there(
    python: str, source: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(source)
    about = (
        "import sys; theirs = sys.modules.get('sitecustomize')\n"
        "print(getattr(theirs, '__file__', theirs), sys.path)"
    )

    plain, hooked = both_ways(python, "-c", about, PYTHONPATH=str(tmp_path))

    assert hooked == plain


def test_an_interpreter_outside_a_job_is_left_alone(python: str) -> None:
    source = """
        import json, os, sys
        print(json.dumps([len(sys.meta_path), len(type(os.environ).__mro__), sys.path]))
        """
    plain = said(python, source, hooked=False)

    assert said(python, source, hooked=False, PYTHONPATH=str(HOOKS)) == plain


WRITES = """
    import ctypes, json, os, sys
    name, answers = "CUDA_VISIBLE_DEVICES", []
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for value in sys.argv[1:]:
        os.environ[name] = value
        answers.append([os.environ[name], getenv(name.encode()).decode()])
    print(json.dumps(answers))
    """


def test_a_number_outside_the_lease_is_mapped_and_one_line_says_so(python: str) -> None:
    inside = {"1": "GPU-5", "": "", "-1": "-1", "GPU-5": "GPU-5", "0,": "GPU-3"}
    written = {"5": "GPU-5", "3": "GPU-3", "6,7": BOTH, "5,3": "GPU-5,GPU-3"}
    values = inside | written

    child = run(python, "-c", dedent(WRITES), *values, *values, GPULEASE_STRICT="1")

    assert child.returncode == 0
    assert json.loads(child.stdout) == 2 * [[value, value] for value in values.values()]
    lines = child.stderr.splitlines()
    assert len(lines) == len(written)
    for line, value in zip(lines, written, strict=True):
        assert mentions(line, "gpulease: ", f"CUDA_VISIBLE_DEVICES={value} ")


@pytest.mark.parametrize(("strict", "status"), [("", 0), ("1", 97)])
@pytest.mark.parametrize(("written", "found"), [("7", "-1"), ("0,1,2", BOTH)])
def test_a_device_that_is_lost_is_one_line_and_ends_a_strict_job(
    python: str, written: str, found: str, strict: str, status: int
) -> None:
    child = run(python, "-c", dedent(WRITES), written, GPULEASE_STRICT=strict)

    assert child.returncode == status
    assert child.stdout == ("" if strict else json.dumps([[found, found]]) + "\n")
    assert child.stderr.count("\n") == 1
    assert mentions(child.stderr, "gpulease: ", f"CUDA_VISIBLE_DEVICES={written} ")


def test_the_lease_returns_where_a_script_removes_visible_devices(python: str) -> None:
    answers = said(
        python,
        """
        import json, os
        name, answers = "CUDA_VISIBLE_DEVICES", []
        del os.environ[name]
        answers.append([os.environ[name], os.environ.pop(name)])
        os.environ.clear()
        answers.append(sorted(os.environ.items()))
        os.environ.update({name: "0", "OTHER": "x"})
        answers.append(sorted(os.environ.items()))
        print(json.dumps(answers))
        """,
    )

    kept = ["XLA_PYTHON_CLIENT_MEM_FRACTION", SHARE]
    name = "CUDA_VISIBLE_DEVICES"
    assert answers[0] == [BOTH, BOTH]
    assert answers[1] == [[name, BOTH], kept]
    assert answers[2] == [[name, "GPU-3"], ["OTHER", "x"], kept]


def test_a_script_may_lower_its_share_of_jax_by_either_name_but_not_raise_it(python: str) -> None:
    answers = said(
        python,
        """
        import json, os
        old, new = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
        answers = []
        for name, value in ((old, ".01"), (old, ".9"), (new, ".9"), (new, ".01"), (new, "x")):
            os.environ[name] = value
            answers.append([os.environ.get(old), os.environ.get(new)])
        del os.environ[new]
        answers.append([os.environ.get(old), os.environ.get(new)])
        print(json.dumps(answers))
        """,
    )

    assert answers == [
        [".01", None], [SHARE, None], [None, SHARE], [None, ".01"], [None, SHARE], [SHARE, None],
    ]  # fmt: skip


@pytest.mark.parametrize(("exported", "kept"), [(".01", ".01"), (".9", SHARE), ("x", SHARE)])
def test_a_share_of_jax_that_a_shell_script_exports_by_its_new_name_keeps_one_name(
    python: str, exported: str, kept: str
) -> None:
    old, new = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    source = f"import json, os; print(json.dumps([os.environ.get({old!r}), {new!r} in os.environ]))"

    child = run(python, "-c", source, **{new: exported})

    assert json.loads(child.stdout) == [kept, False]


FOUND = "import json, os; print(json.dumps(os.environ['CUDA_VISIBLE_DEVICES']))"


@pytest.mark.parametrize(
    ("written", "found", "lines"),
    [("0", "GPU-3", 0), ("1", "GPU-5", 0), (BOTH, BOTH, 0), ("", "", 0), ("5", "GPU-5", 1),
     ("8,9", BOTH, 1), ("9", "-1", 1), ("9" * 5000, "-1", 1)],
)  # fmt: skip
def test_what_a_shell_script_wrote_to_visible_devices_stays_in_the_lease(
    python: str, written: str, found: str, lines: int
) -> None:
    child = run(python, "-c", FOUND, CUDA_VISIBLE_DEVICES=written)

    assert json.loads(child.stdout) == found
    assert child.stderr.count("\n") == lines


@pytest.mark.parametrize("way", ["putenv", "setenv", "subprocess"])
def test_a_child_finds_its_part_of_the_lease_however_the_variable_was_set(
    python: str, way: str
) -> None:
    source = f"""
        import ctypes, os, subprocess, sys
        name, found = "CUDA_VISIBLE_DEVICES", {FOUND!r}
        environment = None
        if {way!r} == "putenv":
            os.putenv(name, "5")
        elif {way!r} == "setenv":
            ctypes.CDLL(None).setenv(name.encode(), b"5", 1)
        else:
            environment = dict(os.environ, CUDA_VISIBLE_DEVICES="5")
        sys.exit(subprocess.call([sys.executable, "-c", found], env=environment))
        """

    child = run(python, "-c", dedent(source))

    assert json.loads(child.stdout) == "GPU-5"
    assert mentions(child.stderr, "gpulease: ", "CUDA_VISIBLE_DEVICES=5 ")


FAKE = {
    "tensorflow/__init__.py": """
        __version__ = "2.99.0"
        import tensorflow.python.eager.context
        """,
    "tensorflow/core/protobuf/config_pb2.py": """
        import copy
        from types import SimpleNamespace

        class Repeated(list):
            def add(self):
                self.append(SimpleNamespace(memory_limit_mb=[]))
                return self[-1]

        class ConfigProto:
            def __init__(self):
                self.device_count = {}
                self.gpu_options = SimpleNamespace(
                    per_process_gpu_memory_fraction=0, visible_device_list="", allow_growth=False,
                    experimental=SimpleNamespace(virtual_devices=Repeated()))

            def CopyFrom(self, other):
                self.__dict__ = copy.deepcopy(other.__dict__)
        """,
    "tensorflow/python/eager/context.py": """
        from types import SimpleNamespace
        from tensorflow.core.protobuf.config_pb2 import ConfigProto

        names = [b"/physical_device:CPU:0", b"/physical_device:GPU:0", b"/physical_device:GPU:1"]
        pywrap_tfe = SimpleNamespace(TF_ListPhysicalDevices=lambda: names)

        class Context:
            @property
            def config(self):
                return ConfigProto()
        """,
    "tensorflow/python/client/session.py": """
        class BaseSession:
            def __init__(self, target="", graph=None, config=None):
                self.config = config
        """,
    "tensorflow/python/client/device_lib.py": """
        def list_local_devices(session_config=None):
            return session_config
        """,
}
SERVER = {
    "tensorflow/python/training/server_lib.py": """
        from types import SimpleNamespace
        tensorflow_server_pb2 = SimpleNamespace(ServerDef=type("ServerDef", (), {}))
        class Server:
            def __init__(self, server_or_cluster_def, config=None):
                self.config = config
        """
}
FOUR_ENTRANCES = """
import json
import tensorflow
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.python.client.device_lib import list_local_devices
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager.context import Context
from tensorflow.python.training.server_lib import Server
protos = [Context().config, BaseSession(config=ConfigProto()).config, Server({}).config,
          list_local_devices()]
print(json.dumps([
    [[d.memory_limit_mb for d in p.gpu_options.experimental.virtual_devices],
     p.gpu_options.visible_device_list] for p in protos]))
"""


def write(folder: Path, files: dict[str, str]) -> str:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        path.write_text(dedent(source))
    return str(folder)


def test_tensorflow_is_held_to_the_lease_at_all_four_entrances(python: str, tmp_path: Path) -> None:
    path = write(tmp_path, SERVER | FAKE)

    limit = 8192 - 1400
    assert said(python, FOUR_ENTRANCES, PYTHONPATH=path) == [[[[limit], [limit]], "0,1"]] * 4


def test_a_tensorflow_that_replaces_its_module_is_held_to_the_lease_in_a_running_python(
    python: str, tmp_path: Path
) -> None:
    # As 1.14 does, whose module then has no __spec__.
    replaced = """
        import sys, types
        class Wrapper(types.ModuleType):
            def __getattr__(self, name):
                return getattr(sys.modules["tensorflow.python"].wrapped, name)
        import tensorflow.python
        tensorflow.python.wrapped = sys.modules["tensorflow"]
        sys.modules["tensorflow"] = Wrapper("tensorflow")
        """
    init = dedent(FAKE["tensorflow/__init__.py"]) + dedent(replaced)
    path = write(tmp_path, SERVER | FAKE | {"tensorflow/__init__.py": init})
    source = f"""
        import importlib.util, json, os, sys
        import tensorflow
        assert tensorflow.__spec__ is None
        os.environ.update({LEASE!r})
        path = {str(HOOKS / "sitecustomize.py")!r}
        spec = importlib.util.spec_from_file_location("_gpulease_site", path)
        site = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(site)
        site.hooks_module("running").enforce(site, os.environ["GPULEASE_HOOK"])
        from tensorflow.python.eager.context import Context
        print(json.dumps(Context().config.gpu_options.visible_device_list))
        """

    assert said(python, source, hooked=False, PYTHONPATH=path) == "0,1"


def test_a_script_that_clears_its_environment_is_held_to_the_lease_all_the_same(
    python: str, tmp_path: Path
) -> None:
    path = write(tmp_path, SERVER | FAKE)
    source = "import os\nos.environ.clear()\n" + FOUR_ENTRANCES

    assert said(python, source, PYTHONPATH=path) == said(python, FOUR_ENTRANCES, PYTHONPATH=path)


def test_source_and_loader_of_a_framework_are_as_in_a_plain_interpreter(
    python: str, tmp_path: Path
) -> None:
    path = write(tmp_path, SERVER | FAKE)
    source = """
        import importlib.util, inspect, json
        spec = importlib.util.find_spec("tensorflow")
        import tensorflow as tf
        tf = importlib.reload(tf)
        print(json.dumps([
            type(spec.loader).__name__, type(tf.__spec__.loader).__name__,
            sorted(vars(tf.__spec__.loader)), tf.__loader__ is tf.__spec__.loader,
            inspect.getsource(tf), tf.__file__, sorted(vars(tf))]))
        """

    plain, hooked = (said(python, source, hooked=way, PYTHONPATH=path) for way in (False, True))

    assert hooked == plain


@pytest.mark.parametrize(("strict", "status"), [("", 0), ("1", 97)])
def test_a_name_that_a_new_tensorflow_lacks_is_reported_in_one_line(
    python: str, strict: str, status: int, tmp_path: Path
) -> None:
    path = write(tmp_path, FAKE)

    child = run(python, "-c", "import tensorflow", PYTHONPATH=path, GPULEASE_STRICT=strict)

    assert child.returncode == status
    assert mentions(child.stderr, "gpulease: ", "TensorFlow 2.99.0", "Server.__init__")
    assert child.stderr.count("\n") == 1


@pytest.mark.parametrize(("strict", "status"), [("", 0), ("1", 97)])
def test_a_failure_of_ours_is_one_line_and_breaks_nothing(
    python: str, strict: str, status: int, tmp_path: Path
) -> None:
    path = write(tmp_path, SERVER | FAKE)
    source = "import tensorflow; print(tensorflow.__version__)"
    devices = LEASE["CUDA_VISIBLE_DEVICES"]
    broken = f'not JSON, "visible":"{devices}"'

    child = run(python, "-c", source, PYTHONPATH=path, GPULEASE_STRICT=strict, GPULEASE_HOOK=broken)

    assert child.returncode == status
    assert child.stdout == ("" if strict else "2.99.0\n")
    assert mentions(child.stderr, "gpulease: ", "tensorflow", "JSONDecodeError: ")
    assert child.stderr.count("\n") == 1


def test_a_framework_that_cannot_be_imported_fails_in_its_own_words(
    python: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {"tensorflow/__init__.py": "import no_such_library_here"})
    source = """
        import json
        errors = []
        for _ in range(2):
            try:
                import tensorflow
            except ImportError as error:
                errors.append(str(error))
        print(json.dumps(errors))
        """

    plain, hooked = (said(python, source, hooked=way, PYTHONPATH=path) for way in (False, True))

    assert hooked == plain


@pytest.mark.parametrize("name", ["tensorflow.py", "tensorflow/data.txt"])
def test_a_file_or_folder_that_only_has_the_name_is_left_alone(
    python: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()

    # An installed TensorFlow would win over a folder.
    source = """
        import sys
        sys.path = [entry for entry in sys.path if "site-packages" not in entry]
        import tensorflow
        print(1)
        """

    assert said(python, source, PYTHONPATH=str(tmp_path)) == 1
