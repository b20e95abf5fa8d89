"""A child process for each of two GPUs, which it finds in its environment."""

import os
import subprocess
import sys

CHILD = "import os; print('child:', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"

for gpu in range(2):
    environment = os.environ.copy()
    environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    subprocess.run([sys.executable, "-c", CHILD], env=environment, check=True)
