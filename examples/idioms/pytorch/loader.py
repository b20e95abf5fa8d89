"""Load batches in worker processes into pinned memory, and copy them to the GPU."""

import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TensorDataset(torch.arange(64.0).reshape(64, 1), torch.ones(64))
    loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=device == "cuda")
    total = 0.0
    for inputs, labels in loader:
        x = inputs.to(device, non_blocking=True)
        y = labels.to(device, non_blocking=True)
        total += (x.squeeze(1) * y).sum().item()
    print(f"sum: {total:.0f}")
