"""Tries to exceed its lease and reports how far it gets: the script that `doctor --prove` runs.

Runs as a job under the caller's Python, with the standard library only. Each line on stdout is a
JSON object: {"held": bytes} after each step, {"refused": bytes held so far, "by": level, "why":
text}, {"opened": path} or {"closed": path, "why": text}, {"cannot": why} if it cannot try.
"""

import ctypes
import errno
import glob
import json
import os
import sys
import time

STEP = 32 << 20
PAUSE_S = 0.1
SEEN_S = 3.0
"""How long it keeps its memory after a refusal, at most, so that the daemon sees it."""
PAGE = 4096
CUDA_SUCCESS = 0
CUDA_OUT_OF_MEMORY = 2


class Refused(Exception):
    """An allocation was refused, by which level and with which message."""

    def __init__(self, by, why):
        Exception.__init__(self, why)
        self.by = by
        self.why = why


class CannotTry(Exception):
    """The test cannot run here."""


def say(**what):
    """Write one line of the report."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def host_memory():
    """Return a function that allocates host memory, which counts for simulated GPUs."""
    held = []

    def take(size):
        piece = bytearray(size)
        for place in range(0, size, PAGE):
            piece[place] = 1
        held.append(piece)

    return take


def device_memory():
    """Return a function that allocates on the first GPU through CUDA's driver API."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotTry("cannot load libcuda.so.1: %s" % error)
    context, device = ctypes.c_void_p(), ctypes.c_int()
    for call in (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxSetCurrent(context),
    ):
        code = call()
        if code == CUDA_OUT_OF_MEMORY:
            raise Refused("driver", "CUDA_ERROR_OUT_OF_MEMORY")
        if code != CUDA_SUCCESS:
            raise CannotTry("CUDA returned error %d" % code)

    def take(size):
        pointer = ctypes.c_uint64()
        code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if code == CUDA_OUT_OF_MEMORY:
            raise Refused("driver", "CUDA_ERROR_OUT_OF_MEMORY")
        if code != CUDA_SUCCESS:
            raise CannotTry("cuMemAlloc returned error %d" % code)

    return take


def torch_memory():
    """Return a function that allocates on the first GPU through PyTorch."""
    import torch

    held = []

    def take(size):
        try:
            held.append(torch.ones(size, dtype=torch.uint8, device="cuda:0"))
        except torch.cuda.OutOfMemoryError as error:
            raise Refused("framework", first_line(error))

    return take


def tensorflow_memory():
    """Return a function that allocates on the first GPU through TensorFlow."""
    import tensorflow

    held = []

    def take(size):
        try:
            with tensorflow.device("/GPU:0"):
                held.append(tensorflow.ones([size], dtype=tensorflow.uint8))
        except tensorflow.errors.ResourceExhaustedError as error:
            raise Refused("framework", first_line(error))

    return take


def jax_memory():
    """Return a function that allocates on the first GPU through JAX."""
    import jax
    import jax.numpy

    held = []

    def take(size):
        try:
            held.append(jax.numpy.ones((size,), dtype="uint8").block_until_ready())
        except Exception as error:  # noqa: BLE001  (the class differs between versions)
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise Refused("framework", first_line(error))

    return take


def first_line(error):
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0][:200]


WAYS = {
    "host": host_memory,
    "device": device_memory,
    "torch": torch_memory,
    "tensorflow": tensorflow_memory,
    "jax": jax_memory,
}


def allocate(way, most, stays_s):
    """Allocate step by step up to `most` bytes, then sleep for `stays_s` seconds."""
    held = 0
    try:
        take = WAYS[way]()
        while held < most:
            take(STEP)
            held += STEP
            say(held=held)
            time.sleep(PAUSE_S)
    except Refused as refused:
        say(refused=held, by=refused.by, why=refused.why)
        time.sleep(min(stays_s, SEEN_S))
        return
    except CannotTry as error:
        say(cannot=str(error))
        return
    except Exception as error:  # noqa: BLE001  (frameworks raise any exception)
        say(cannot="%s: %s" % (type(error).__name__, first_line(error)))
        return
    time.sleep(stays_s)


def open_devices(pattern):
    """Try to open every device node that matches `pattern`."""
    for path in sorted(glob.glob(pattern)):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            say(opened=path)
        except OSError as error:
            say(closed=path, why=errno.errorcode.get(error.errno, str(error.errno)))


if __name__ == "__main__":
    if sys.argv[1] == "open":
        open_devices(sys.argv[2])
    else:
        allocate(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
