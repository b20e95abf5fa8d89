"""Place a part of the work on every GPU, and add up the results."""

import torch

count = torch.cuda.device_count()
devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
parts = [torch.full((32, 32), 2.0, device=device) for device in devices]
total = sum((part @ part).sum().to("cpu") for part in parts)
print(f"{count} GPUs, sum: {total.item():.0f}")
