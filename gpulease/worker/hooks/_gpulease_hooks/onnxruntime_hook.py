"""Limits ONNX Runtime to the lease: sets the option gpu_mem_limit of its CUDA provider.

The option reaches C++ where a session is created with providers, and where providers are added to
the options of a session. It limits the arena of one session. Allocators that a script registers
itself, the provider for TensorRT and providers chosen by a policy have no such option.
"""

import functools
import importlib
from typing import Any

from . import report
from .hook import ReportFailure, Undo, is_older, lifting, visible_gpus, wrap
from .lease import Lease, LeaseTooSmall

CUDA = "CUDAExecutionProvider"
OPTION = "gpu_mem_limit"
OLDEST = (1, 8)
"""The first version that knows the option."""


def install(onnxruntime: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported ONNX Runtime; `raw` is the lease as JSON."""
    lease = Lease(raw)
    if lease.simulated:
        return lease.lift
    version = str(getattr(onnxruntime, "__version__", "of unknown version"))
    native = importlib.import_module("onnxruntime.capi._pybind_state")
    session = getattr(native, "InferenceSession", None)
    if is_older(onnxruntime, OLDEST) or not hasattr(session, "initialize_session"):
        report_failure("ONNX Runtime {} is not limited to the lease".format(version))
        return lease.lift
    limit = _Limit(lease, version)
    undos = [wrap([session], "initialize_session", limit.of_session)]
    for name, by in (("add_provider", limit.by_name), ("add_provider_for_devices", limit.by_gpu)):
        if hasattr(native.SessionOptions, name):
            undos.append(wrap([native.SessionOptions], name, by))
    return lifting(lease, *undos)


class _Limit:
    """Wraps the functions that hand options of providers to C++."""

    def __init__(self, lease: Lease, version: str) -> None:
        self._lease = lease
        self._version = version

    def of_session(self, original: Any) -> Any:
        @functools.wraps(original)
        def initialize_session(
            session: Any, providers: Any, options: Any, *rest: Any, **others: Any
        ) -> Any:
            limited = [self._limited(*each) for each in zip(providers, options)]
            return original(session, providers, limited, *rest, **others)

        return initialize_session

    def by_name(self, original: Any) -> Any:
        @functools.wraps(original)
        def add_provider(session_options: Any, name: str, options: Any) -> Any:
            return original(session_options, name, self._limited(name, options))

        return add_provider

    def by_gpu(self, original: Any) -> Any:
        @functools.wraps(original)
        def add_provider_for_devices(session_options: Any, devices: Any, options: Any) -> Any:
            names = [getattr(each, "ep_name", "") for each in devices]
            name = CUDA if CUDA in names else ""
            return original(session_options, devices, self._limited(name, options))

        return add_provider_for_devices

    def _limited(self, provider: str, options: "dict[str, str]") -> "dict[str, str]":
        """Return the options with the smaller of the script's limit and the lease's."""
        if provider != CUDA or self._lease.lifted:
            return options
        asked = str(options.get(OPTION, "")).strip()
        limit = self._limit(
            self._gpu(str(options.get("device_id", "0"))), int(asked) if asked.isdigit() else None
        )
        return dict(options, **{OPTION: str(limit)})

    def _limit(self, gpu: "dict[str, Any]", asked: "int | None") -> int:
        """Take a pool, which all sessions of this process have, and return the limit of one."""
        name, lease = "onnxruntime", self._lease
        most = lease.most(name, gpu)
        try:
            lease.check(name, "ONNX Runtime")
            size = lease.take(name, gpu, asked)
            if size < min(most if asked is None else asked, most):
                size = lease.resize(name, gpu, most if asked is None else asked)
        except LeaseTooSmall as error:
            # For a RuntimeError ONNX Runtime prints a line and computes on the CPU.
            raise MemoryError(str(error)) from error
        report.begin(lease, name, self._version, list, [{"gpu": gpu["uuid"], "limit": size}])
        return size if asked is None else min(size, asked)

    def _gpu(self, device: str) -> "dict[str, Any]":
        gpus = visible_gpus(self._lease)
        if device.isdigit() and int(device) < len(gpus):
            return gpus[int(device)]
        # It is not there, or the variable was changed after CUDA had read it.
        return min(self._lease.gpus, key=lambda gpu: self._lease.most("onnxruntime", gpu))
