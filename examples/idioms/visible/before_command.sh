#!/bin/sh
# GPUs are chosen before each command, and for all that follow.
here=$(dirname "$0")

CUDA_VISIBLE_DEVICES=0,1 python3 "$here/found.py"
CUDA_VISIBLE_DEVICES=1 python3 "$here/found.py"
export CUDA_VISIBLE_DEVICES=0
python3 "$here/found.py"
