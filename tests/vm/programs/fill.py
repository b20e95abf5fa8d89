"""Fill that many MiB of RAM and stay a moment: in this process, or in a child of its own."""

import os
import sys

if len(sys.argv) > 2:
    pid = os.fork()
    if pid:
        sys.exit(1 if os.waitpid(pid, 0)[1] else 0)
kept = []
for _ in range(int(sys.argv[1])):
    kept.append(bytearray(b"x") * (1 << 20))
