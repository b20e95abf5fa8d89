"""Hold as many MiB as a file says, as it says it: hungry.py FILE [deaf].

Says on standard output how much it holds. A deaf one does not go when it is asked to.
"""

import os
import signal
import sys
import time
from pathlib import Path

held = 0
block = b""
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\n"))
while True:
    wanted = int(Path(sys.argv[1]).read_text() or held)
    if wanted != held:
        block = b""
        block = b"x" * (wanted << 20)
        held = wanted
        os.write(1, f"holds {held}\n".encode())
    time.sleep(0.05)
