"""Choose the current GPU once; "cuda" means that one from then on."""

import torch

torch.cuda.set_device(1)
batch = torch.ones(64, 64, device="cuda")
print(f"GPU {torch.cuda.current_device()}, sum: {batch.cuda().sum().item():.0f}")
