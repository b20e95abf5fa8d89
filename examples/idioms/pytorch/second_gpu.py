"""Work on the second GPU by name, without a look at what is there."""

import torch

device = torch.device("cuda:1")
weights = torch.ones(64, 64).to(device)
product = torch.ones(64, 64, device="cuda:1") @ weights
print(f"sum: {product.sum().item():.0f}")
