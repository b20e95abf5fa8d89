"""What scripts do to TensorFlow's configuration, and what TensorFlow must then be handed.

Data for test_tensorflow_limits.py; the key of a row names its test. In a scenario `tf`, `v1`
(tf.compat.v1) and `os` are there already, and what it leaves in `seen` is compared too.
"""

from textwrap import dedent
from typing import Any, NamedTuple

POOL = 4096
"""MiB that TensorFlow's pool may have on each of the two GPUs, of TOTAL."""
TOTAL = 81559

BOTH = {"limits": [[POOL], [POOL]], "visible": "0,1", "fraction": 0, "unified": False}
FIRST = {"limits": [[POOL]], "visible": "0", "fraction": 0}
SECOND = {"limits": [[POOL]], "visible": "1", "fraction": 0}
NONE = {"limits": [], "gpus": 0}
TWO_CPUS = {"limits": [], "cpus": 2}
TUNED = BOTH | {"inter": 2, "intra": 3, "soft": True, "log": True}

USE = "tf.constant(1) + tf.constant(1)\n"
GPUS = "gpus = tf.config.list_physical_devices('GPU')\n"
GROW = GPUS + "for gpu in gpus: tf.config.experimental.set_memory_growth(gpu, True)\n"
LOGICAL = """\
size = tf.config.LogicalDeviceConfiguration
logical = tf.config.set_logical_device_configuration
"""
KERAS = """
import numpy as np
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
with tf.device("CPU"):
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
"""


class Row(NamedTuple):
    """One scenario: the parts of the last configuration that reached C++, and `seen`."""

    source: str
    sent: dict[str, Any]
    seen: Any = None
    lease: str = "plain"


def session(change: str) -> str:
    """Open a TF1 session with a changed proto; `seen` tells whether the caller's stayed so."""
    start, end = "config = v1.ConfigProto()\n", "before = str(config)\nv1.Session(config=config)\n"
    return start + dedent(change) + end + "seen = str(config) == before\n"


def too_late(statement: str) -> str:
    """Do what TensorFlow refuses after its start; `seen` is what it says."""
    attempt = f"try:\n    {statement}\nexcept RuntimeError as error:\n    seen = str(error)\n"
    return USE + GPUS + LOGICAL + attempt


NOTHING_SPECIAL = {
    "a script that configures nothing gets the lease": Row(USE, BOTH),
    "Keras gets the lease": Row(KERAS, BOTH),
    "a session without a config gets the lease": Row("v1.Session()", BOTH),
    "TensorFlow's source and loader are its own": Row(
        """
        import inspect
        from tensorflow.python.client.session import BaseSession
        kinds = [type(loader).__name__ for loader in (tf.__spec__.loader, tf.__loader__)]
        sources = [inspect.getsource(it) for it in (tf, BaseSession.__init__)]
        seen = kinds + ["__version__" in sources[0], "target" in sources[1]]
        v1.Session()
        """,
        BOTH,
        ["SourceFileLoader", "SourceFileLoader", True, True],
    ),
}

TF_CONFIG = {
    "memory growth works together with the limit": Row(
        GROW
        + USE
        + "seen = [tf.config.experimental.get_memory_growth(gpus[0]),\n"
        + "        tf.config.get_logical_device_configuration(gpus[0])]\n",
        BOTH | {"growth": True},
        [True, None],
    ),
    "logical GPUs larger than the lease are scaled down alike": Row(
        GPUS + LOGICAL + "logical(gpus[0], [size(6000), size(2000)])\n" + USE,
        BOTH | {"limits": [[3072, 1024], [POOL]]},
    ),
    "logical GPUs that fit are left as they are": Row(
        GPUS
        + LOGICAL
        + "logical(gpus[0], [size(1000), size(2000)])\nlogical(gpus[1], [size(1500)])\n"
        + USE,
        BOTH | {"limits": [[1000, 2000], [1500]]},
    ),
    "a script may show itself one GPU": Row(
        GPUS + "tf.config.set_visible_devices(gpus[1], 'GPU')\n" + USE, SECOND
    ),
    "a script may show itself no GPU": Row(
        "tf.config.set_visible_devices([], 'GPU')\n" + USE, NONE
    ),
    "growth after the start fails in TensorFlow's words": Row(
        too_late("tf.config.experimental.set_memory_growth(gpus[0], True)"),
        BOTH,
        "Physical devices cannot be modified after being initialized",
    ),
    "visible devices after the start fail in TensorFlow's words": Row(
        too_late("tf.config.set_visible_devices(gpus[1], 'GPU')"),
        BOTH,
        "Visible devices cannot be modified after being initialized",
    ),
    "logical GPUs after the start fail in TensorFlow's words": Row(
        too_late("logical(gpus[0], [size(9000)])"),
        BOTH,
        "Virtual devices cannot be modified after being initialized",
    ),
    "a context with a config of its own is held to the lease": Row(
        """
        from tensorflow.python.eager.context import Context
        config = v1.ConfigProto()
        config.gpu_options.visible_device_list = "1"
        config.gpu_options.per_process_gpu_memory_fraction = 0.5
        Context(config).ensure_initialized()
        """,
        SECOND,
    ),
    "a variable that leaves the pool is dropped before C++ reads it": Row(
        """
        os.environ["TF_GPU_ALLOCATOR"] = "cuda_malloc_async"
        tf.constant(1)
        seen = os.environ.get("TF_GPU_ALLOCATOR")
        """,
        BOTH,
    ),
}

TF1 = {
    "a session's large fraction becomes the lease": Row(
        session("""\
            config.gpu_options.per_process_gpu_memory_fraction = 0.9
            config.gpu_options.allow_growth = True
            """),
        BOTH | {"growth": True},
        True,
    ),
    "a session's small fraction is kept": Row(
        session("config.gpu_options.per_process_gpu_memory_fraction = 0.02\n"),
        BOTH | {"limits": [[1631], [1631]]},
        True,
    ),
    "a session that asks for unified memory gets none": Row(
        session("""\
            config.gpu_options.per_process_gpu_memory_fraction = 3
            config.gpu_options.experimental.use_unified_memory = True
            config.gpu_options.experimental.use_cuda_malloc_async = True
            """),
        BOTH | {"async": False},
        True,
    ),
    "a session may list the GPUs it sees": Row(
        session("config.gpu_options.visible_device_list = '1'\n"), SECOND, True
    ),
    "a session may count its GPUs to none": Row(
        session("config.device_count['GPU'] = 0\n"), NONE, True
    ),
    "a session may count its GPUs to one": Row(
        session("config.device_count['GPU'] = 1\n"), FIRST, True
    ),
    "a session's own logical GPUs are scaled down": Row(
        session("""\
            for sizes in ([6000, 2000], [1500]):
                device = config.gpu_options.experimental.virtual_devices.add()
                device.memory_limit_mb.extend(sizes)
            """),
        BOTH | {"limits": [[3072, 1024], [1500]]},
        True,
    ),
    "a graph script with MonitoredTrainingSession trains in the lease": Row(
        """
        with tf.Graph().as_default():
            weight = v1.get_variable("w", initializer=5.0)
            step = v1.train.get_or_create_global_step()
            descent = v1.train.GradientDescentOptimizer(0.1)
            train = descent.minimize(weight * weight, global_step=step)
            with v1.train.MonitoredTrainingSession() as session:
                for _ in range(20):
                    session.run(train)
                seen = float(session.run(weight)) < 1
        """,
        BOTH,
        True,
    ),
    "a server and a session on it get the lease": Row(
        """
        config = v1.ConfigProto()
        config.gpu_options.per_process_gpu_memory_fraction = 0.9
        server = v1.train.Server.create_local_server(config=config)
        options = server.server_def.default_session_config.gpu_options
        seen = [list(it.memory_limit_mb) for it in options.experimental.virtual_devices]
        v1.Session(server.target)
        """,
        BOTH,
        [[POOL], [POOL]],
    ),
    "a server made of a ServerDef gets the lease once": Row(
        """
        one = v1.train.Server.create_local_server(start=False)
        tf.distribute.Server(one.server_def, None, None, None, None, False)
        """,
        BOTH,
    ),
    "listing the local devices creates no larger pool": Row(
        """
        from tensorflow.python.client import device_lib
        seen = [device.name for device in device_lib.list_local_devices()]
        """,
        BOTH,
        ["/device:CPU:0"],
    ),
}

OPTIONS = {
    "growth can be asked for from outside": Row(USE, BOTH | {"growth": True}, lease="growing"),
    "growth from outside holds against the script": Row(
        GROW.replace("True", "False") + USE, BOTH | {"growth": True}, lease="growing"
    ),
    "a split lease is two logical GPUs on each": Row(
        USE, BOTH | {"limits": [[POOL // 2] * 2] * 2}, lease="split"
    ),
    "a script's own logical GPUs come before the split": Row(
        GPUS + LOGICAL + "logical(gpus[0], [size(1000)])\n" + USE,
        BOTH | {"limits": [[1000], [POOL // 2] * 2]},
        lease="split",
    ),
    "threads and placement come from outside for a session": Row(
        session(""), TUNED, True, lease="tuned"
    ),
    "threads and placement come from outside in eager mode": Row(
        USE + "seen = tf.config.threading.get_intra_op_parallelism_threads()",
        TUNED,
        3,
        lease="tuned",
    ),
    "each GPU has its own limit": Row(
        USE, BOTH | {"limits": [[POOL], [POOL - 1024]]}, lease="unequal"
    ),
    "the limit follows the GPU that the script shows itself": Row(
        GPUS + "tf.config.set_visible_devices(gpus[1], 'GPU')\n" + USE,
        SECOND | {"limits": [[POOL - 1024]]},
        lease="unequal",
    ),
    "a lease too small for a GPU still runs on the CPU": Row(
        "tf.config.set_visible_devices([], 'GPU')\n" + USE, NONE, lease="small"
    ),
}

SIMULATED = {
    "simulated GPUs are logical CPU devices in eager mode": Row(
        "seen = len(tf.config.list_logical_devices('CPU'))", TWO_CPUS, 2, lease="simulated"
    ),
    "simulated GPUs are logical CPU devices in a session": Row(
        """
        config = v1.ConfigProto()
        config.gpu_options.per_process_gpu_memory_fraction = 0.5
        seen = len(v1.Session(config=config).list_devices())
        """,
        TWO_CPUS | {"fraction": 0.5},
        2,
        lease="simulated",
    ),
    "Keras trains on simulated GPUs": Row(KERAS, TWO_CPUS, lease="simulated"),
    "a script's own logical CPU devices come first": Row(
        LOGICAL
        + "logical(tf.config.list_physical_devices('CPU')[0], [size()] * 3)\n"
        + "seen = len(tf.config.list_logical_devices('CPU'))",
        {"limits": [], "cpus": 3},
        3,
        lease="simulated",
    ),
    "a split simulated lease is more logical CPU devices": Row(
        "seen = len(tf.config.list_logical_devices('CPU'))",
        {"cpus": 4, "intra": 3},
        4,
        lease="simulated split",
    ),
}

ROWS = NOTHING_SPECIAL | TF_CONFIG | TF1 | OPTIONS | SIMULATED
