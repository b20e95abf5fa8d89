"""Limit the share of each GPU by hand, as on a machine that is shared by agreement."""

import torch

if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    torch.cuda.set_per_process_memory_fraction(0.01, device="cuda:1")
    torch.cuda.empty_cache()

device = "cuda:0" if torch.cuda.is_available() else "cpu"
print(f"sum: {torch.ones(64, 64, device=device).sum().item():.0f}")
