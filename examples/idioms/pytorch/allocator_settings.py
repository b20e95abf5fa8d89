"""Configure the allocator in the script, before the import."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:128,garbage_collection_threshold:0.8"
os.environ["CUDA_VISIBLE_DEVICES"] = "1"

import torch

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
print(f"sum: {torch.ones(64, 64).to(device).sum().item():.0f}")
