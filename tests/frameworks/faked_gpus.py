"""A process of a job with real frameworks that believe in its GPUs; what they are handed is read.

Reads Python expressions from stdin, one a line, and answers each with a line of JSON: its value,
or the text of its exception. Frameworks are imported on first use. Arguments: the number of GPUs,
the bytes of each, and folders to append to sys.path, for frameworks of other environments.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

COUNT, TOTAL = int(sys.argv[1]), int(sys.argv[2])
MIB = 2**20
sent = []
shares = {}
contexts = set()
reserved = [0] * COUNT


def tensorflow(setup=""):
    """Start TensorFlow after the statements `setup`; return the bytes that C++ got for each GPU."""
    sys.path.insert(0, str(Path(__file__).parent))
    import tensorflow as tf
    from tensorflow_zygote import fake_gpus, listen

    if not sent:
        fake_gpus(COUNT)
        listen(sent)
    exec(setup, {"tf": tf})
    tf.constant(1) + tf.constant(1)
    return [int(sum(sizes)) * MIB for sizes in sent[-1]["limits"]]


def torch(setup=""):
    """Start CUDA in PyTorch after the statements `setup`; return `handed()`."""
    import torch

    at = [0]
    torch._C._cuda_getDeviceCount = lambda: COUNT
    torch._C._cuda_init = lambda: None
    torch._C._cuda_getDevice = lambda: at[0]
    torch._C._cuda_setDevice = lambda device: at.__setitem__(0, device)
    torch._C._cuda_hasPrimaryContext = lambda device: device in contexts
    torch._C._cuda_setMemoryFraction = lambda share, device: shares.__setitem__(device, share)
    torch.cuda.device_count = lambda: COUNT
    torch.cuda.memory_reserved = lambda device=0: reserved[device]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=TOTAL)
    torch.cuda._queued_calls[:] = [
        each for each in torch.cuda._queued_calls if "_check" not in each[0].__name__
    ]
    exec(setup, {"torch": torch})
    torch.cuda.init()
    return handed()


def handed():
    """Return the bytes of each GPU that PyTorch was last handed."""
    return [int(shares[device] * TOTAL) for device in sorted(shares)]


def jax():
    """Create JAX's client of the GPU; return the bytes that C++ got, the same for each GPU."""
    import jax  # noqa: F401
    from jaxlib import xla_client

    found = {}
    xla_client._xla = SimpleNamespace(
        get_c_api_client=lambda name, options, *rest: found.update(options)
    )
    xla_client.make_c_api_client("cuda", xla_client.generate_pjrt_gpu_plugin_options())
    return int(found["memory_fraction"] * TOTAL)


def main():
    sys.path.extend(sys.argv[3:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = {"value": eval(line)}
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
