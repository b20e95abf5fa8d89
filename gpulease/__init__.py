"""gpulease: leases of GPU memory on shared machines."""

__version__ = "0.1.0"
