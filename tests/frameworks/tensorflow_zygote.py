"""Run scenarios against a real TensorFlow that believes it has GPUs; one import serves them all.

Reads scenarios from stdin: a JSON object, by name, of {"source": Python, "variables": those of its
lease, "gpus": how many}. Writes the version and what came of them to stdout as JSON. Each runs in a
fork of the process that imported TensorFlow, so each finds it as a fresh process would; the hooks
are installed in the fork. No GPU is needed: TensorFlow's list of devices is faked, and the
configuration is read at the last line of Python that has it. Runs on Python 3.6 and TensorFlow
1.13. What each result holds:

  seen    the value that the scenario left in `seen`
  error   type and text of the exception that ended it, or null
  sent    every configuration that reached C++, in order, as `told` below writes it

With the number of a socket as its argument, it is faked_gpus.py in a fork for each message instead:
JSON of {"variables": those of its lease, "arguments": its own}, with its stdin and its stdout. It
answers with the pid.
"""

import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

SEPARATOR = "=== results ==="


def told(config):
    """Write the parts of a ConfigProto that a lease is about."""
    gpu = config.gpu_options
    return {
        "limits": [list(device.memory_limit_mb) for device in gpu.experimental.virtual_devices],
        "visible": gpu.visible_device_list,
        "growth": gpu.allow_growth,
        "fraction": gpu.per_process_gpu_memory_fraction,
        "unified": gpu.experimental.use_unified_memory,
        "async": getattr(gpu.experimental, "use_cuda_malloc_async", False),  # from 2.5 on
        "gpus": config.device_count.get("GPU"),
        "cpus": config.device_count.get("CPU"),
        "inter": config.inter_op_parallelism_threads,
        "intra": config.intra_op_parallelism_threads,
        "soft": config.allow_soft_placement,
        "log": config.log_device_placement,
    }


def fake_gpus(count):
    """Let TensorFlow list so many GPUs; 1.13 has no such list."""
    from tensorflow.python.eager import context

    names = [b"/physical_device:CPU:0"]
    names += [b"/physical_device:GPU:%d" % number for number in range(count)]
    library = getattr(context, "pywrap_tfe", None) or context.pywrap_tensorflow
    if hasattr(library, "TF_ListPhysicalDevices"):
        library.TF_ListPhysicalDevices = lambda: names


def listen(sent):
    """Record every configuration on its way to C++, and let it go on."""
    from tensorflow.core.protobuf import config_pb2, tensorflow_server_pb2
    from tensorflow.python.client import device_lib, session
    from tensorflow.python.eager import context
    from tensorflow.python.training import server_lib

    def recorded(module, name, config_of):
        plain = getattr(module, name)

        def recording(*args, **kwargs):
            config = config_of(*args, **kwargs)
            sent.append(None if config is None else told(config))
            return plain(*args, **kwargs)

        setattr(module, name, recording)

    def listed(session_config=None):
        given = session_config
        return config_pb2.ConfigProto.FromString(given) if isinstance(given, bytes) else given

    def served(text):
        return tensorflow_server_pb2.ServerDef.FromString(text).default_session_config

    eager = getattr(context, "pywrap_tfe", None) or context.pywrap_tensorflow
    devices = getattr(device_lib, "_pywrap_device_lib", None) or device_lib.pywrap_tensorflow
    parse = config_pb2.ConfigProto.FromString
    recorded(eager, "TFE_ContextOptionsSetConfig", lambda _, text: parse(text))
    recorded(session.tf_session, "TF_NewSessionOptions", lambda target, config: config)
    recorded(devices, "list_devices", listed)
    recorded(server_lib.c_api, "TF_NewServer", served)


def enter(variables):
    """Put this process into a lease, as gpulease.lease() does in a Python that already runs."""
    os.environ.update(variables)
    path = Path(variables["PYTHONPATH"].split(":")[0], "sitecustomize.py")
    spec = importlib.util.spec_from_file_location("_gpulease_site", str(path))
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    site.hooks_module("running").enforce(site, variables["GPULEASE_HOOK"])


def run(source, variables, gpus):
    """Return what came of one scenario, in this process."""
    import tensorflow as tf

    sent = []
    fake_gpus(gpus)
    listen(sent)
    names = {"tf": tf, "v1": tf.compat.v1, "seen": None, "os": os, "sys": sys}
    error = None
    try:
        enter(variables)
        exec(compile(source, "<scenario>", "exec"), names)
    except Exception as problem:  # noqa: BLE001  (whatever it is, it is the result)
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    return {"seen": names["seen"], "error": error, "sent": sent}


def in_a_fork(scenario):
    """Return what came of one scenario, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as result:
            json.dump(run(**scenario), result)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"seen": None, "error": f"status {status}", "sent": []}


def serve(channel):
    """Be faked_gpus.py in a fork for each message, until the other end of the channel is closed."""
    importlib.import_module("tensorflow")
    # Nobody waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            channel.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            wanted = json.loads(message)
            enter(wanted["variables"])
            sys.argv[1:] = wanted["arguments"]
            runpy.run_path(str(Path(__file__).with_name("faked_gpus.py")), run_name="__main__")
            os._exit(0)
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


def main():
    if sys.argv[1:]:
        serve(socket.socket(fileno=int(sys.argv[1])))
        return
    scenarios = json.load(sys.stdin)
    import tensorflow as tf

    results = {name: in_a_fork(scenario) for name, scenario in scenarios.items()}
    sys.stdout.write(SEPARATOR + "\n")
    json.dump({"version": tf.__version__, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
