"""Train one model in several processes: torchrun --nproc-per-node 2 distributed.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

has_gpu = torch.cuda.is_available()
rank = int(os.environ["LOCAL_RANK"])
if has_gpu:
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if has_gpu else "gloo")

torch.manual_seed(rank)
model = nn.Linear(4, 1).to("cuda" if has_gpu else "cpu")
model = DistributedDataParallel(model, device_ids=[rank] if has_gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.full((8, 4), float(rank)).to("cuda" if has_gpu else "cpu")
for _ in range(5):
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()

weights = model.module.weight.sum().item()
print(f"rank {rank} of {dist.get_world_size()}: weights {weights:.4f}", flush=True)
dist.destroy_process_group()
