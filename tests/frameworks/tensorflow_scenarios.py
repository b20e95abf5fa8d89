"""What scripts do to TensorFlow's configuration, and what TensorFlow must then be handed.

Data for test_tensorflow_limits.py; the key of a row names its test. In a scenario `tf`, `v1`
(tf.compat.v1) and `os` are there already, and what it leaves in `seen` is compared too. Scenarios
run on Python 3.6, and on every TensorFlow from 1.13 on unless `since` or `before` says otherwise;
tf.config came with 1.14.
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
TWO_CPUS = {"limits": [], "cpus": 2, "soft": True}
TUNED = BOTH | {"inter": 2, "intra": 3, "soft": True, "log": True}

USE = "v1.enable_eager_execution()\ntf.constant(1) + tf.constant(1)\n"
CONFIG = """\
conf = tf.config if hasattr(tf.config, 'list_physical_devices') else tf.config.experimental
set_growth = tf.config.experimental.set_memory_growth
size = getattr(conf, 'LogicalDeviceConfiguration', None) or conf.VirtualDeviceConfiguration
logical = getattr(conf, 'set_logical_device_configuration',
                  tf.config.experimental.set_virtual_device_configuration)
"""
GPUS = CONFIG + "gpus = conf.list_physical_devices('GPU')\n"
STDERR = "import io, sys\nsys.stderr = io.StringIO()\n"
SAID = """\
lines = sys.stderr.getvalue().splitlines(True)
seen = ''.join(line for line in lines if line.startswith('gpulease'))
"""
COUNT_CPUS = "seen = len(tf.config.experimental.list_logical_devices('CPU'))\n"
GROW = GPUS + "for gpu in gpus: set_growth(gpu, True)\n"
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
    since: tuple[int, int] = (1, 13)
    before: tuple[int, int] = (99, 0)

    def misfit(self, version: tuple[int, int]) -> str:
        """Return why this makes no sense in a version of TensorFlow; "" if it does."""
        since = max(self.since, (1, 14)) if "tf.config" in self.source else self.since
        if version < since:
            return "not in TensorFlow before {}.{}".format(*since)
        return "not in TensorFlow since {}.{}".format(*self.before) * (version >= self.before)


def session(change: str) -> str:
    """Open a TF1 session with a changed proto; `seen` tells whether the caller's stayed so."""
    start, end = "config = v1.ConfigProto()\n", "before = str(config)\nv1.Session(config=config)\n"
    return start + dedent(change) + end + "seen = str(config) == before\n"


def too_late(statement: str) -> str:
    """Do what TensorFlow refuses after its start; `seen` is what it says."""
    attempt = f"try:\n    {statement}\nexcept RuntimeError as error:\n    seen = str(error)\n"
    return USE + GPUS + attempt


NOTHING_SPECIAL = {
    "a script that configures nothing gets the lease": Row(USE, BOTH),
    "Keras gets the lease": Row(KERAS, BOTH),
    "a session without a config gets the lease": Row("v1.Session()", BOTH),
}

TF_CONFIG = {
    "memory growth works together with the limit": Row(
        GROW
        + USE
        + "seen = [tf.config.experimental.get_memory_growth(gpus[0]),\n"
        + "        tf.config.experimental.get_virtual_device_configuration(gpus[0])]\n",
        BOTH | {"growth": True},
        [True, None],
    ),
    "logical GPUs larger than the lease are scaled down alike": Row(
        GPUS + "logical(gpus[0], [size(6000), size(2000)])\n" + USE,
        BOTH | {"limits": [[3072, 1024], [POOL]]},
    ),
    "logical GPUs that fit are left as they are": Row(
        GPUS + "logical(gpus[0], [size(1000), size(2000)])\nlogical(gpus[1], [size(1500)])\n" + USE,
        BOTH | {"limits": [[1000, 2000], [1500]]},
    ),
    "a script may show itself one GPU": Row(
        GPUS + "conf.set_visible_devices(gpus[1], 'GPU')\n" + USE, SECOND
    ),
    "a script that skips the only GPU is told that it has none": Row(
        STDERR + GPUS + "conf.set_visible_devices(gpus[1:], 'GPU')\n" + USE + SAID,
        NONE,
        "gpulease: set_visible_devices() without a GPU: this process uses the CPU; the job has "
        "GPU 0\n",
        lease="one",
    ),
    "a script that wants the CPU is told nothing": Row(
        STDERR + CONFIG + "conf.set_visible_devices([], 'GPU')\n" + USE + SAID,
        NONE,
        "",
        lease="one",
    ),
    "a script may show itself no GPU": Row(
        CONFIG + "conf.set_visible_devices([], 'GPU')\n" + USE, NONE
    ),
    "growth after the start fails in TensorFlow's words": Row(
        too_late("set_growth(gpus[0], True)"),
        BOTH,
        "Physical devices cannot be modified after being initialized",
    ),
    "visible devices after the start fail in TensorFlow's words": Row(
        too_late("conf.set_visible_devices(gpus[1], 'GPU')"),
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
        Context(config).num_gpus()
        """,
        SECOND,
    ),
    "eager mode with a ConfigProto is held to the lease, and may be enabled twice": Row(
        """
        config = v1.ConfigProto()
        config.gpu_options.per_process_gpu_memory_fraction = 0.9
        config.gpu_options.allow_growth = True
        for _ in range(2):
            v1.enable_eager_execution(config=config)
            tf.constant(1) + tf.constant(1)
        seen = config.gpu_options.visible_device_list
        """,
        BOTH | {"growth": True},
        "",
        before=(2, 0),
    ),
    "a variable that leaves the pool is dropped before C++ reads it": Row(
        """
        os.environ["TF_GPU_ALLOCATOR"] = "cuda_malloc_async"
        v1.enable_eager_execution()
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
            if hasattr(config.gpu_options.experimental, "use_cuda_malloc_async"):
                config.gpu_options.experimental.use_cuda_malloc_async = True
            """),
        BOTH | {"async": False},
        True,
    ),
    "a session may list the GPUs it sees": Row(
        session("config.gpu_options.visible_device_list = '1'\n"), SECOND, True
    ),
    "a session with another number in a lease of one GPU gets that GPU, and a line": Row(
        STDERR
        + "config = v1.ConfigProto()\n"
        + "config.gpu_options.visible_device_list = '1'\n"
        + "v1.Session(config=config)\nv1.Session(config=config)\n"
        + SAID,
        FIRST,
        "gpulease: visible_device_list=1 is read as GPU 0 of the job, GPU 1 of the machine\n",
        lease="one",
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
    "an Estimator trains in the lease": Row(
        """
        import tempfile
        def model(features, labels, mode):
            weight = v1.get_variable("w", initializer=5.0)
            descent = v1.train.GradientDescentOptimizer(0.1)
            train = descent.minimize(weight * weight, v1.train.get_or_create_global_step())
            return tf.estimator.EstimatorSpec(mode, loss=weight * weight, train_op=train)
        config = v1.ConfigProto()
        config.gpu_options.per_process_gpu_memory_fraction = 0.9
        run = tf.estimator.RunConfig(session_config=config)
        with tempfile.TemporaryDirectory() as folder:
            estimator = tf.estimator.Estimator(model, model_dir=folder, config=run)
            estimator.train(lambda: tf.constant([1.0]), steps=20)
            seen = float(estimator.get_variable_value("w")) < 1
        """,
        BOTH,
        True,
        before=(2, 16),
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
        v1.train.Server(one.server_def, None, None, None, None, False)
        """,
        BOTH,
    ),
    "listing the local devices creates no larger pool": Row(
        """
        from tensorflow.python.client import device_lib
        seen = [it.name for it in device_lib.list_local_devices() if it.device_type == "CPU"]
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
    "a lease split into sizes that fit is logical GPUs of these sizes": Row(
        USE, BOTH | {"limits": [[1024, 2048]] * 2}, lease="sized"
    ),
    "a lease split into sizes that do not fit is divided in proportion": Row(
        session(""), BOTH | {"limits": [[1024, 3072]] * 2}, True, lease="sized too large"
    ),
    "a script's own logical GPUs come before sizes": Row(
        GPUS + "logical(gpus[0], [size(1000)])\n" + USE,
        BOTH | {"limits": [[1000], [1024, 2048]]},
        lease="sized",
    ),
    "a deterministic lease refuses no random number without a seed": Row(
        """
        seen = [tf.random.normal([1]).numpy().tolist() for _ in range(2)]
        tf.random.set_seed(1)
        again = [tf.random.normal([1]).numpy().tolist() for _ in range(2)]
        from tensorflow.python.framework.config import is_op_determinism_enabled
        seen = [seen == again, seen[0] != seen[1], is_op_determinism_enabled()]
        """,
        BOTH,
        [True, True, True],
        lease="deterministic",
        since=(2, 9),
    ),
    "an old TensorFlow in a deterministic lease is left to its variable": Row(
        USE, BOTH, lease="deterministic", before=(2, 8)
    ),
    "a script's own logical GPUs come before the split": Row(
        GPUS + "logical(gpus[0], [size(1000)])\n" + USE,
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
        USE, BOTH | {"limits": [[POOL], [POOL - 1024]]}, lease="unequal", since=(1, 14)
    ),
    "where TensorFlow cannot list its GPUs each gets the smallest limit": Row(
        USE, BOTH | {"limits": [[POOL - 1024], [POOL - 1024]]}, lease="unequal", before=(1, 14)
    ),
    "the limit follows the GPU that the script shows itself": Row(
        GPUS + "conf.set_visible_devices(gpus[1], 'GPU')\n" + USE,
        SECOND | {"limits": [[POOL - 1024]]},
        lease="unequal",
    ),
    "a lease too small for a GPU still runs on the CPU": Row(
        CONFIG + "conf.set_visible_devices([], 'GPU')\n" + USE, NONE, lease="small"
    ),
}

SIMULATED = {
    "simulated GPUs are logical CPU devices in eager mode": Row(
        COUNT_CPUS,
        TWO_CPUS,
        2,
        lease="simulated",
    ),
    "simulated GPUs are logical CPU devices in a session": Row(
        """
        config = v1.ConfigProto()
        config.gpu_options.per_process_gpu_memory_fraction = 0.5
        devices = v1.Session(config=config).list_devices()
        seen = len([device for device in devices if device.device_type == "CPU"])
        """,
        TWO_CPUS | {"fraction": 0.5},
        2,
        lease="simulated",
    ),
    "Keras trains on simulated GPUs": Row(KERAS, TWO_CPUS, lease="simulated"),
    "a script's own logical CPU devices come first": Row(
        CONFIG + "logical(conf.list_physical_devices('CPU')[0], [size()] * 3)\n" + COUNT_CPUS,
        {"limits": [], "cpus": 3, "soft": True},
        3,
        lease="simulated",
    ),
    "what a script places on a GPU runs on simulated GPUs": Row(
        """
        with tf.Graph().as_default():
            with tf.device("/gpu:1"):
                three = tf.constant(1) + tf.constant(2)
            seen = int(v1.Session(config=v1.ConfigProto()).run(three))
        """,
        TWO_CPUS,
        3,
        lease="simulated",
    ),
    "what a script places on a GPU in eager mode runs on simulated GPUs": Row(
        """
        v1.enable_eager_execution()
        with tf.device("/gpu:1"):
            seen = int(tf.constant(1) + tf.constant(2))
        """,
        TWO_CPUS,
        3,
        lease="simulated",
        since=(2, 4),
    ),
    "a simulated lease split into sizes is as many logical CPU devices": Row(
        session(""), TWO_CPUS | {"cpus": 4}, True, lease="simulated sized"
    ),
    "a split simulated lease is more logical CPU devices": Row(
        COUNT_CPUS,
        {"cpus": 4, "intra": 3},
        4,
        lease="simulated split",
    ),
}

TOO_SMALL = {
    "a lease too small for TensorFlow is refused in eager mode": Row(USE, {}, lease="small"),
    "a lease too small for TensorFlow is refused in a session": Row(session(""), {}, lease="small"),
}

ROWS = NOTHING_SPECIAL | TF_CONFIG | TF1 | OPTIONS | SIMULATED
