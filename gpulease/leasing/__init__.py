"""Leases for the process that runs: the Python API; its face, through which others import it."""

from gpulease.leasing.api import lease
from gpulease.leasing.held import Lease, LeasedGpu

__all__ = ["Lease", "LeasedGpu", "lease"]
