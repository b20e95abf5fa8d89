"""Split each batch between all GPUs with DataParallel."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.DataParallel(nn.Linear(8, 1)).to(device)
output = model(torch.ones(32, 8, device=device))
print(f"outputs: {len(output)}")
