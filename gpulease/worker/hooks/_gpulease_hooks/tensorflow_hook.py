"""Hold TensorFlow 2 to the lease, at the four places where it is handed a configuration.

The limit is put into the ConfigProto as late as that, and not through tf.config when TensorFlow
is imported: there it would make the script's own set_memory_growth fail, and the script's own
logical devices would silently replace it. The four: the eager context (which also serves Keras
and every Session without a config), a TF1 Session, a server, and device_lib, which creates the
GPU's one allocator when it only lists devices. The names are TensorFlow's private ones; where one
is missing, that is reported.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, Callable

from . import pools, report
from .clamp import clamp
from .lease import Lease, LeaseTooSmall

Trouble = Callable[[str], None]
Clamp = Callable[[Any, bool], None]
Undo = Callable[[], None]

# With either of these TensorFlow's C++ takes its memory outside the pool that is limited.
WAYS_OUT = ("TF_FORCE_UNIFIED_MEMORY", "TF_GPU_ALLOCATOR")


def install(tensorflow: Any, raw: str, trouble: Trouble) -> Undo:
    """Hook the TensorFlow that was just imported; `raw` is the lease as JSON.

    What is returned lifts the limit: it is for a TensorFlow that was never used under the lease.
    """
    lease = Lease(raw)
    version = getattr(tensorflow, "__version__", "of unknown version")
    configure = _clamp_for(lease, trouble, version)
    missing = []
    undos = [lease.lift]  # for a wrapper that somebody else has wrapped meanwhile
    for name, hook in ENTRANCES:
        try:
            undos.append(hook(configure))
        except (ImportError, AttributeError, KeyError):
            missing.append(name)
    if missing:
        trouble("TensorFlow {} is not held to the lease at {}".format(version, ", ".join(missing)))

    def lift() -> None:
        for undo in undos:
            undo()

    return lift


def _clamp_for(lease: Lease, trouble: Trouble, version: str) -> Clamp:
    def configure(config: Any, cpus_are_a_wish: bool) -> None:
        if lease.lifted:
            return
        try:
            if not lease.simulated:
                _close_ways_out()
            clamp(config, lease, _pools(lease), cpus_are_a_wish)
            _report(config, lease, version)
        except LeaseTooSmall:
            raise
        except Exception as error:  # noqa: BLE001  (a failure of ours must not end the script)
            trouble(
                "TensorFlow is not held to the lease: {}: {}".format(type(error).__name__, error)
            )

    return configure


def _report(config: Any, lease: Lease, version: str) -> None:
    """Have the daemon told from now on what the pools hold that `config` makes."""
    try:
        layout = pools.layout(config, lease)
    except Exception:  # noqa: BLE001  (a TensorFlow that we do not know is limited, and not seen)
        return
    report.begin(lease, "tensorflow", version, lambda: pools.held(layout))


def _replace(owner: Any, name: str, new: Any) -> Undo:
    """Put `new` in the place of an attribute; what is returned puts the old one back."""
    plain = vars(owner)[name]
    setattr(owner, name, new)

    def undo() -> None:
        if vars(owner).get(name) is new:
            setattr(owner, name, plain)

    return undo


def _close_ways_out() -> None:
    for name in WAYS_OUT:
        if os.environ.get(name, "").lower() not in ("", "0", "false"):
            del os.environ[name]


def _pools(lease: Lease) -> list[tuple[int, int]]:
    """Return (limit, capacity) of the GPUs that TensorFlow sees, in its order."""
    if lease.simulated:
        return []
    context = importlib.import_module("tensorflow.python.eager.context")
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    pools = lease.pools("tensorflow", entries)
    seen = [
        device
        for device in context.pywrap_tfe.TF_ListPhysicalDevices()
        if device.decode().split(":")[1] == "GPU"
    ]
    if len(seen) == len(pools):
        return pools
    # The variable was changed after CUDA had read it, or TensorFlow cannot use one of the GPUs:
    # which is which is unknown, so each may have what the smallest may have.
    return [min(lease.pools("tensorflow", lease.visible.split(",")))] * len(seen)


def _hook_context(configure: Clamp) -> Undo:
    context = importlib.import_module("tensorflow.python.eager.context").Context
    plain = vars(context)["config"]

    @functools.wraps(plain.fget)
    def config(self: Any) -> Any:
        proto = plain.fget(self)  # made anew at every look
        configure(proto, False)
        return proto

    return _replace(context, "config", property(config, plain.fset, plain.fdel, plain.__doc__))


def _hook_session(configure: Clamp) -> Undo:
    session = importlib.import_module("tensorflow.python.client.session").BaseSession
    plain = vars(session)["__init__"]

    @functools.wraps(plain)
    def __init__(self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        # Without a config it takes the context's, which is clamped; what is no ConfigProto,
        # TensorFlow refuses in its own words.
        if config is not None and isinstance(config, _config_proto()):
            config = _copy(config)
            configure(config, True)
        plain(self, target, graph, config)

    return _replace(session, "__init__", __init__)


def _hook_server(configure: Clamp) -> Undo:
    library = importlib.import_module("tensorflow.python.training.server_lib")
    server = library.Server
    plain = vars(server)["__init__"]
    server_def = library.tensorflow_server_pb2.ServerDef

    @functools.wraps(plain)
    def __init__(self: Any, server_or_cluster_def: Any, *args: Any, **kwargs: Any) -> None:
        proto = _config_proto()()
        if isinstance(server_or_cluster_def, server_def):
            server_or_cluster_def = _copy(server_or_cluster_def)
            proto.CopyFrom(server_or_cluster_def.default_session_config)
            # TensorFlow merges the two, and a merge would add up the virtual devices.
            server_or_cluster_def.ClearField("default_session_config")
        args, kwargs, given = _taken(args, kwargs, place=3)
        if given is not None:
            proto.MergeFrom(given)
        configure(proto, True)
        plain(self, server_or_cluster_def, *args, config=proto, **kwargs)

    return _replace(server, "__init__", __init__)


def _taken(args: Any, kwargs: Any, place: int) -> Any:
    """Take the argument `config` out of a call; what comes after it gets its name."""
    if len(args) <= place:
        rest = {name: value for name, value in kwargs.items() if name != "config"}
        return args, rest, kwargs.get("config")
    if len(args) > place + 1:
        kwargs = dict(kwargs, start=args[place + 1])
    return args[:place], kwargs, args[place]


def _hook_device_list(configure: Clamp) -> Undo:
    library = importlib.import_module("tensorflow.python.client.device_lib")
    plain = library.list_local_devices

    @functools.wraps(plain)
    def list_local_devices(session_config: Any = None) -> Any:
        proto = _config_proto()() if session_config is None else _copy(session_config)
        configure(proto, True)
        return plain(proto)

    return _replace(library, "list_local_devices", list_local_devices)


ENTRANCES = (
    ("Context.config", _hook_context),
    ("BaseSession.__init__", _hook_session),
    ("Server.__init__", _hook_server),
    ("device_lib.list_local_devices", _hook_device_list),
)


def _config_proto() -> Any:
    return importlib.import_module("tensorflow.core.protobuf.config_pb2").ConfigProto


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
