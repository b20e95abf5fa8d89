"""Limits TensorFlow, from 1.13 on, to the lease, at the functions that receive a configuration.

The limit is set in the ConfigProto that late, not through tf.config after the import: there it
would make the script's own set_memory_growth fail, and the script's own logical devices would
silently replace it. The functions are those of the eager context (which also serves Keras and,
from 1.14 on, every Session without a config), a TF1 Session, a server, and device_lib, which
creates the GPU's only allocator when it lists devices. They are private names of TensorFlow; if
one is missing, that is reported.
"""

import functools
import importlib
import os
import sys
import threading
from typing import Any

from . import devices, report
from .hook import ReportFailure, Undo, lifting, replace, reporting, visible_gpus
from .lease import MIB, Lease
from .tensorflow_config import limit_config, take_pools

SEED = 1
"""Of TensorFlow's random numbers, with --deterministic."""

# With either of these TensorFlow's C++ allocates outside the pool that is limited.
UNLIMITED = ("TF_FORCE_UNIFIED_MEMORY", "TF_GPU_ALLOCATOR")


def install(tensorflow: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported TensorFlow; `raw` is the lease as JSON.

    The returned function removes the limit from a TensorFlow that was not used under the lease.
    """
    lease = Lease(raw)
    version = getattr(tensorflow, "__version__", "of unknown version")
    configure = _Limiter(lease, report_failure, version)
    missing = []
    undos = []
    for name, hook in HOOKED:
        try:
            undos.append(hook(configure))
        except (ImportError, AttributeError, KeyError):
            missing.append(name)
    undos.append(_hook_choice(lease))
    if lease.options["deterministic"]:
        _make_deterministic(tensorflow, report_failure)
    if missing:
        report_failure(
            "TensorFlow {} is not limited to the lease at {}".format(version, ", ".join(missing))
        )
    return lifting(lease, *undos)


def _make_deterministic(tensorflow: Any, report_failure: ReportFailure) -> None:
    """Use deterministic operations; before TensorFlow 2.8 an environment variable does that.

    TensorFlow then refuses random operations that have no seed, so there is one until the script
    sets another. It holds for eager mode and functions, not for graphs that a script creates.
    """
    config = getattr(tensorflow, "config", None)  # which 1.13 lacks
    enable = getattr(getattr(config, "experimental", None), "enable_op_determinism", None)
    if enable is None:
        return
    with reporting(report_failure, "TensorFlow is not deterministic"):
        enable()
        tensorflow.random.set_seed(SEED)


class _Limiter:
    """Limits each configuration to the lease, and to what is left of it."""

    def __init__(self, lease: Lease, report_failure: ReportFailure, version: str) -> None:
        self._lease = lease
        self._report_failure = report_failure
        self._version = version
        self._has_created = False

    def __call__(self, config: Any, creates: bool) -> None:
        """Limit `config`; `creates` tells that a session or server is created with it.

        Otherwise it is that of the eager context, which scripts may also read before they change
        their settings. What it takes is given back when it is read again.
        """
        if self._lease.lifted:
            return
        with reporting(self._report_failure, "TensorFlow is not limited to the lease"):
            if not self._lease.simulated:
                _disable_unlimited_allocators()
            limit_config(config, self._lease, _pool_limits(self._lease), creates)
            if not self._lease.simulated:
                self._take(config)
            self._has_created = self._has_created or creates
            _report(config, self._lease, self._version)

    def created(self) -> None:
        """Note that TensorFlow has created its pools. It keeps the first one on each GPU."""
        self._has_created = True

    def _take(self, config: Any) -> None:
        lease = self._lease
        if not self._has_created and not _is_started():
            lease.release("tensorflow")
        gpus = visible_gpus(lease) or lease.gpus

        def take(number: int, wanted: int) -> int:
            known = number < len(gpus)
            return lease.take("tensorflow", gpus[number], wanted) if known else wanted

        take_pools(config, take)


def _is_started() -> bool:
    module = sys.modules.get("tensorflow.python.eager.context")
    context = module.context_safe() if hasattr(module, "context_safe") else None
    return bool(getattr(context, "_initialized", False))


def _report(config: Any, lease: Lease, version: str) -> None:
    """Report the pools that `config` creates to the daemon from now on."""
    try:
        layout = _layout(config, lease)
    except Exception:  # noqa: BLE001  (an unknown TensorFlow is limited but not reported)
        return
    limits = [{"gpu": place["gpu"], "limit": place["limit"]} for place in layout]
    report.begin(lease, "tensorflow", version, lambda: _pools_of(layout), limits)


def _layout(config: Any, lease: Lease) -> "list[dict[str, Any]]":
    """Return the logical devices on each GPU and the limit of its pool, from a ConfigProto.

    TensorFlow allocates a pool that may not grow as a whole at its start. On simulated GPUs,
    logical CPUs stand in for the GPUs, without a limit.
    """
    if lease.simulated:
        return [
            {"gpu": gpu["uuid"], "devices": ["CPU:%d" % place], "limit": None, "grows": True}
            for place, gpu in enumerate(lease.gpus)
        ]
    options = config.gpu_options
    gpus = visible_gpus(lease)
    virtual = options.experimental.virtual_devices
    names = [name for name in options.visible_device_list.split(",") if name.isdigit()]
    grows = bool(options.allow_growth) or os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
    found, first = [], 0
    for name, device in zip(names, virtual):
        count = len(device.memory_limit_mb)
        if int(name) < len(gpus):
            found.append(
                {
                    "gpu": gpus[int(name)]["uuid"],
                    "devices": ["GPU:%d" % (first + each) for each in range(count)],
                    "limit": int(sum(device.memory_limit_mb)) * MIB,
                    "grows": grows,
                }
            )
        first += count
    return found


def _pools_of(places: "list[dict[str, Any]]") -> "list[dict[str, Any]]":
    """Return the size and peak of the pools in `places`; nothing before TensorFlow starts.

    Uses the existing context and never creates one.
    """
    module = sys.modules.get("tensorflow.python.eager.context")
    context = module.context_safe() if module is not None else None
    if context is None or not getattr(context, "_initialized", False):
        return []
    pools = []
    for place in places:
        known = [found for device in place["devices"] for found in _memory_info(context, device)]
        if known:
            current = sum(each["current"] for each in known)
            pools.append(
                {
                    "gpu": place["gpu"],
                    "pool": _pool_size(place, current),
                    "peak": sum(each["peak"] for each in known),
                    "limit": place["limit"],
                }
            )
    return pools


def _pool_size(place: "dict[str, Any]", current: int) -> "int | None":
    if place["limit"] is None:
        return current
    # A growing pool holds more than is in use, and TensorFlow does not report how much.
    return None if place["grows"] else int(place["limit"])


def _memory_info(context: Any, device: str) -> "list[dict[str, int]]":
    try:
        return [context.get_memory_info(device)]
    except Exception:  # noqa: BLE001  (no such device, or one without counters)
        return []


def _replace(owner: Any, name: str, new: Any) -> Undo:
    """Replace an attribute of `owner` itself by `new`; the returned function restores it."""
    return replace([owner], name, vars(owner)[name], new)


def _disable_unlimited_allocators() -> None:
    for name in UNLIMITED:
        if os.environ.get(name, "").lower() not in ("", "0", "false"):
            del os.environ[name]


def _pool_limits(lease: Lease) -> "list[tuple[int, int]]":
    """Return (pool limit, total) in MiB of the GPUs that TensorFlow sees, in its order."""
    if lease.simulated:
        return []
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    pools = lease.pools("tensorflow", entries)
    seen = _count_gpus()
    if seen == len(pools):
        return pools
    # The variable was changed after CUDA had read it, TensorFlow cannot use one of the GPUs, or it
    # cannot count them. Which GPU is which is unknown, so each gets the smallest limit.
    smallest = min(lease.pools("tensorflow", lease.visible.split(",")))
    return [smallest] * (len(pools) if seen is None else seen)


def _count_gpus() -> "int | None":
    """Return how many GPUs TensorFlow sees; None before 1.14, which cannot list them so early.

    This creates no allocator.
    """
    context = importlib.import_module("tensorflow.python.eager.context")
    library = getattr(context, "pywrap_tfe", None) or getattr(context, "pywrap_tensorflow", None)
    list_devices = getattr(library, "TF_ListPhysicalDevices", None)
    if list_devices is None:
        return None
    return sum(device.decode().split(":")[1] == "GPU" for device in list_devices())


def _hook_context(configure: _Limiter) -> Undo:
    context = importlib.import_module("tensorflow.python.eager.context").Context
    if "config" not in vars(context):
        return _hook_old_context(context, configure)
    original = vars(context)["config"]

    @functools.wraps(original.fget)
    def config(self: Any) -> Any:
        proto = original.fget(self)  # created at every access
        configure(proto, False)
        return proto

    return _replace(
        context, "config", property(config, original.fset, original.fdel, original.__doc__)
    )


def _hook_choice(lease: Lease) -> Undo:
    """Say so where a script that has listed its GPUs shows itself none of them.

    gpus[1:] of one GPU is empty, and TensorFlow goes on with the CPU. Scripts that want the CPU do
    not list GPUs before.
    """
    context = importlib.import_module("tensorflow.python.eager.context").Context
    names = ("list_physical_devices", "set_visible_devices")
    if lease.simulated or not vars(context).keys() >= set(names):
        return lease.lift
    list_devices, set_visible = (vars(context)[name] for name in names)
    listed = []

    @functools.wraps(list_devices)
    def list_physical_devices(self: Any, device_type: Any = None) -> Any:
        found = list_devices(self, device_type)
        listed.extend(each for each in found if each.device_type == "GPU")
        return found

    @functools.wraps(set_visible)
    def set_visible_devices(self: Any, chosen: Any, device_type: Any = None) -> None:
        set_visible(self, chosen, device_type)
        if listed and not chosen and device_type in (None, "GPU"):
            gpus = visible_gpus(lease) or lease.gpus
            text = "set_visible_devices() without a GPU: this process uses the CPU; the job has {}"
            devices.say(text.format(devices.numbered(gpus)))

    undos = [
        _replace(context, names[0], list_physical_devices),
        _replace(context, names[1], set_visible_devices),
    ]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _hook_old_context(context: Any, configure: _Limiter) -> Undo:
    """Hook the eager context of TensorFlow 1.13, which passes on the script's own config or none.

    A script may pass it again, and it must then be the same object. So it is replaced during the
    call only.
    """
    original = vars(context)["_initialize_handle_and_devices"]
    replaced = threading.RLock()

    @functools.wraps(original)
    def _initialize_handle_and_devices(self: Any) -> None:
        if self._context_handle is not None:
            return
        with replaced:
            given = self._config
            self._config = _config_proto()() if given is None else _copy(given)
            try:
                configure(self._config, False)
                original(self)
                configure.created()
            finally:
                self._config = given

    return _replace(context, "_initialize_handle_and_devices", _initialize_handle_and_devices)


def _hook_session(configure: _Limiter) -> Undo:
    session = importlib.import_module("tensorflow.python.client.session").BaseSession
    context = importlib.import_module("tensorflow.python.eager.context").Context
    uses_context = "config" in vars(context)  # without a config of its own
    original = vars(session)["__init__"]

    @functools.wraps(original)
    def __init__(self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        # TensorFlow itself refuses a config that is not a ConfigProto.
        if isinstance(config, _config_proto()):
            config = _copy(config)
            configure(config, True)
        elif config is None and not uses_context:
            config = _config_proto()()
            configure(config, False)
        original(self, target, graph, config)
        configure.created()

    return _replace(session, "__init__", __init__)


def _hook_server(configure: _Limiter) -> Undo:
    library = importlib.import_module("tensorflow.python.training.server_lib")
    server = library.Server
    original = vars(server)["__init__"]
    server_def = library.tensorflow_server_pb2.ServerDef

    @functools.wraps(original)
    def __init__(self: Any, server_or_cluster_def: Any, *args: Any, **kwargs: Any) -> None:
        proto = _config_proto()()
        if isinstance(server_or_cluster_def, server_def):
            server_or_cluster_def = _copy(server_or_cluster_def)
            proto.CopyFrom(server_or_cluster_def.default_session_config)
            # TensorFlow merges the two, which would add up the virtual devices.
            server_or_cluster_def.ClearField("default_session_config")
        args, kwargs, given = _pop_config(args, kwargs, position=3)
        if given is not None:
            proto.MergeFrom(given)
        configure(proto, True)
        original(self, server_or_cluster_def, *args, config=proto, **kwargs)

    return _replace(server, "__init__", __init__)


def _pop_config(args: Any, kwargs: Any, position: int) -> Any:
    """Remove the argument `config` from a call; the argument after it is passed by name."""
    if len(args) <= position:
        rest = {name: value for name, value in kwargs.items() if name != "config"}
        return args, rest, kwargs.get("config")
    if len(args) > position + 1:
        kwargs = dict(kwargs, start=args[position + 1])
    return args[:position], kwargs, args[position]


def _hook_device_list(configure: _Limiter) -> Undo:
    library = importlib.import_module("tensorflow.python.client.device_lib")
    original = library.list_local_devices

    @functools.wraps(original)
    def list_local_devices(session_config: Any = None) -> Any:
        proto = _config_proto()() if session_config is None else _copy(session_config)
        configure(proto, True)
        return original(proto)

    return _replace(library, "list_local_devices", list_local_devices)


HOOKED = (
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
