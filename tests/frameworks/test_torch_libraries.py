"""Libraries on top of PyTorch, and what they plan with and hand to it in a lease, without a GPU."""

import json

import pytest

from frameworks.test_torch_limits import GIB, LEASES, MEMORY, TWO_GPUS, Torch, most
from gpulease.worker.overhead import MIB, default_overhead

POOLS = [lease - default_overhead("torch", 2) for lease in LEASES]


def test_accelerate_plans_with_what_the_lease_leaves_on_each_gpu() -> None:
    """Accelerate touches each GPU before it asks, which cannot be done here."""
    source = f"""{TWO_GPUS}{MEMORY}
from accelerate.utils import get_max_memory
plain = torch.tensor
torch.tensor = lambda *arguments, device=None: plain(*arguments)
free[1] = 70 << 30
found = get_max_memory()
print(json.dumps([found[0], found[1]]))
"""
    found = Torch("torch").said(source)

    assert found == [pytest.approx(pool - GIB, abs=MIB) for pool in POOLS]


def test_accelerate_places_layers_within_the_lease_and_the_rest_on_the_cpu() -> None:
    source = f"""{TWO_GPUS}{MEMORY}
from accelerate import infer_auto_device_map, init_empty_weights
plain = torch.tensor
torch.tensor = lambda *arguments, device=None: plain(*arguments)
free[1] = 70 << 30
with init_empty_weights():
    # Four layers of 2 GiB.
    model = torch.nn.Sequential(*(torch.nn.Linear(1 << 14, 1 << 15, bias=False) for _ in range(4)))
placed = infer_auto_device_map(model)
print(json.dumps(list(placed.values())))
"""
    found = Torch("torch").said(source)

    # 5.7 and 1.7 GiB are free. Accelerate keeps room for the largest layer on the first GPU.
    assert found == [0, "cpu", "cpu", "cpu"]


def test_lightning_trains_on_a_gpu_that_is_limited_by_then() -> None:
    source = f"""{TWO_GPUS}
import logging, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device: (7, 0)
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = lightning.Trainer(
    accelerator="gpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 1)))
except (RuntimeError, AssertionError) as error:
    print(json.dumps([handed, type(error).__name__]))
"""
    child = Torch("torch").run(source)
    handed, error = json.loads(child.stdout.splitlines()[-1])

    assert [device for _, device in handed] == [0, 1], error
    for share, device in handed:
        assert share == pytest.approx(most(device), abs=1e-6)
