"""Whether a framework has begun to use the GPUs of a process, by what is loaded in it."""

import sys
from types import ModuleType
from typing import Any

import pytest

from gpulease.lease_api.cuda_state import claimed_by


def load(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


class Context:
    """As TensorFlow's: made at import or at first use, initialized by the first operation."""

    def __init__(self, initialized: bool) -> None:
        self._initialized = initialized


CONTEXT = "tensorflow.python.eager.context"
UNUSED = [
    (CONTEXT, {"_context": None}),
    (CONTEXT, {"_context": Context(initialized=False)}),
    (CONTEXT, {}),
    ("torch.cuda", {"_initialized": False}),
    ("jax._src.xla_bridge", {"_backends": {}}),
]
USED = [
    (CONTEXT, {"_context": Context(initialized=True)}, "TensorFlow"),
    ("torch.cuda", {"_initialized": True}, "PyTorch"),
    ("jax._src.xla_bridge", {"_backends": {"cuda": object()}}, "JAX"),
]


@pytest.mark.parametrize(("module", "attributes"), UNUSED)
def test_an_import_claims_nothing(
    module: str, attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, module, **attributes)
    assert claimed_by() is None


@pytest.mark.parametrize(("module", "attributes", "name"), USED)
def test_what_has_set_up_its_devices_is_named(
    module: str, attributes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, module, **attributes)
    assert claimed_by() == name
