"""The GPU is an option of the script."""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--gpu", default="0", help="numbers of GPUs; -1: the CPU")
os.environ["CUDA_VISIBLE_DEVICES"] = parser.parse_args().gpu

print("visible:", os.environ["CUDA_VISIBLE_DEVICES"])
