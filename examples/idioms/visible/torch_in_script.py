"""Two GPUs are chosen by their numbers on a shared machine, before PyTorch is imported."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"

import torch

device = torch.device("cuda:1" if torch.cuda.device_count() > 1 else "cpu")
print("sum:", float(torch.ones(100, device=device).sum()))
