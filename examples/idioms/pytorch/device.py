"""Train on the GPU if there is one: the first lines of most scripts."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
inputs = torch.randn(256, 8).to(device)
targets = inputs.sum(dim=1, keepdim=True)

for _ in range(100):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()

print(f"loss: {loss.item():.3f}")
