"""Looks at GPUs: the real ones through NVML, or ones that are simulated by resident memory."""
