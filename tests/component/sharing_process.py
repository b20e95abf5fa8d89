"""A process of a job, for test_shares.py: takes pools of a lease as the hooks of frameworks do.

Reads commands from stdin, one a line, and answers each with a line of JSON:

  take FRAMEWORK GPU WANTED   WANTED in bytes, or - for all; answers its size, or the refusal
  takes FRAMEWORK GPU RESERVED   takes a pool that can shrink to RESERVED bytes
  resize FRAMEWORK GPU WANTED
  limit FRAMEWORK GPU
  release FRAMEWORK
  close                       closes every descriptor, as some daemons do at their start
  walk                        opens and closes each entry of /proc/self/fd
  many                        opens more descriptors than select() takes
  hold GPU                    begins its turn to take memory, and answers never
  fork FRAMEWORK GPU          takes a pool in a forked child, which ends; answers its size
"""

import json
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, sys.argv[1])


def lease():
    from _gpulease_hooks.lease import Lease

    return Lease(os.environ["GPULEASE_HOOK"])


LEASE = lease()
if len(sys.argv) > 2:
    from _gpulease_hooks import shares

    shares.WAIT_FOR_MEMORY = float(sys.argv[2])


def take(framework, gpu, wanted, lower=None):
    from _gpulease_hooks.lease import LeaseTooSmall

    try:
        return LEASE.take(framework, gpu, None if wanted == "-" else int(wanted), lower)
    except LeaseTooSmall as error:
        return str(error)


def fork(framework, gpu):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps(take(framework, gpu, "-")).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text)


def walk():
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            os.close(os.open(entry, os.O_RDONLY | os.O_NONBLOCK))


def many():
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
    for _ in range(1200):
        os.open("/dev/null", os.O_RDONLY)


def hold(gpu):
    with LEASE._shares()._ledger.turn(int(gpu)):
        sys.stdout.write("true\n")
        sys.stdout.flush()
        time.sleep(600)


def obey(verb, *words):
    if verb == "close":
        return os.closerange(3, 4096)
    if verb in ("walk", "many", "hold"):
        return globals()[verb](*words)
    framework = words[0]
    if verb == "release":
        return LEASE.release(framework)
    gpu = LEASE.gpus[int(words[1])]
    if verb == "take":
        return take(framework, gpu, words[2])
    if verb == "takes":
        return take(framework, gpu, "-", lambda size: max(size, int(words[2])))
    if verb == "resize":
        return LEASE.resize(framework, gpu, int(words[2]))
    if verb == "limit":
        return LEASE.limit(framework, gpu)
    return fork(framework, gpu)


for line in sys.stdin:
    answer = obey(*line.split())
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
