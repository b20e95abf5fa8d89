"""Print what a program finds that before_command.sh starts."""

import os

print("visible:", os.environ["CUDA_VISIBLE_DEVICES"])
