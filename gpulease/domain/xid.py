"""The table of the NVIDIA driver's XIDs: meaning, cause, source.

An XID drains a GPU only if NVIDIA asks for a reset, a reboot or a repair and does not name the
user's program among the causes. Otherwise any user could take a GPU out of service. If an error of
a program leaves a GPU in need of a reset, the driver's recovery action reports that and drains the
GPU, whatever the XID.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Blame(StrEnum):
    """The cause of an error."""

    APPLICATION = "application"
    """An error of a program; the GPU is not affected."""
    CONTAINED = "contained"
    """A hardware error that the driver contained by ending the affected programs."""
    HARDWARE = "hardware"
    """A hardware fault, for which the GPU is drained."""
    AVOIDED = "avoided"
    """A hardware fault in memory that the driver avoids until a reset."""
    GONE = "gone"
    """The GPU does not answer; its readings already keep new leases off it."""
    ADMIN = "admin"
    """The cause is not clear. An admin has to investigate; the GPU is not drained."""
    UNKNOWN = "unknown"
    """Not an error; recorded and shown only."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One row of the table."""

    blame: Blame
    what: str
    source: str
    """One or more of `SOURCES`, each with what it states."""


SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "catalog": (
            'NVIDIA, "Analyzing Xid Errors with the Xid Catalog", the immediate action of each: '
            "<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, "
            "as of October 2025"
        ),
        "listing": (
            'NVIDIA, "XID Errors" for driver r555, the causes in its listing: '
            "<https://docs.nvidia.com/deploy/xid-errors/index.html>"
        ),
        "plugin": (
            "NVIDIA's device plugin for Kubernetes, which ignores these as application errors: "
            "<https://github.com/NVIDIA/k8s-device-plugin/issues/1340>"
        ),
        "memory": (
            'NVIDIA, "GPU Memory Error Management", "Error Recovery and Response Flags": '
            "<https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html>"
        ),
    }
)

_COPY = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_DECODE = (68, 83, 84, 88, 89, 96, 97, 98)
_JPEG = (82, *range(99, 106))
_FLOW = (86, 139)
_RESTART = "catalog: restart the application"
_RESET = "catalog: reset the GPU; listing: hardware or the driver, not the application"
_RESET_ONLY = "catalog: reset the GPU; not in the listing"
_IGNORE = "catalog: ignore, or contact support"

_ROWS: tuple[tuple[Blame, str, Mapping[int, str]], ...] = (
    (
        Blame.APPLICATION,
        _RESTART,
        {
            8: "the GPU stopped processing",
            11: "an invalid stream of commands",
            13: "an exception in the graphics engine",
            25: "an illegal stream of commands",
            31: "a memory page fault",
            32: "an invalid stream of commands",
            60: "an exception in the video processor",
            69: "an invalid class or method for the graphics engine",
            80: "corrupted data sent to the GPU",
            **dict.fromkeys(_COPY, "an exception in a copy engine"),
            **dict.fromkeys(_DECODE, "an exception in the video decoder"),
            **dict.fromkeys(_JPEG, "an exception in the JPEG decoder"),
            **dict.fromkeys(_FLOW, "an exception in the optical flow accelerator"),
        },
    ),
    (
        Blame.APPLICATION,
        "plugin",
        {
            43: "the GPU stopped processing a program",
            45: "a program's work was removed after an error",
        },
    ),
    (
        Blame.APPLICATION,
        (
            "plugin; listing: the application, among all others; catalog: reset the GPU, "
            "which the driver requests by its recovery action"
        ),
        {109: "a context switch took too long"},
    ),
    (
        Blame.APPLICATION,
        "catalog: ignore; listing: the driver or the application",
        {66: "an illegal access by the driver", 67: "an illegal access by the driver"},
    ),
    (
        Blame.APPLICATION,
        "catalog: ignore, or check the application",
        {37: "an error in the driver's firmware"},
    ),
    (
        Blame.CONTAINED,
        "catalog: restart the application, the error is contained to it",
        {94: "a memory error that the driver contained"},
    ),
    (
        Blame.AVOIDED,
        "catalog: ignore; memory: new work may be started",
        {63: "a bad memory page or row was recorded"},
    ),
    (
        Blame.HARDWARE,
        _RESET,
        {
            46: "the GPU stopped processing and needs a reset",
            62: "the GPU's power controller halted",
            64: "a bad memory page or row could not be recorded",
            95: "a memory error that was not contained",
            110: "a security fault in the GPU",
            119: "the GPU's system processor (GSP) did not answer",
            120: "an error in the GPU's system processor (GSP)",
            140: "a memory error that the driver could not handle",
            143: "the GPU could not be initialised",
        },
    ),
    (
        Blame.HARDWARE,
        _RESET_ONLY,
        {
            136: "an NVLink could not be trained",
            156: "a part of the GPU will be retired at a reset",
            158: "the GPU did not answer in time",
        },
    ),
    (
        Blame.HARDWARE,
        "catalog: reset the GPU, or reboot; listing: hardware or the driver, not the application",
        {
            48: "an uncorrectable memory error",
            74: "an NVLink error",
            79: "the GPU has fallen off the bus",
        },
    ),
    (
        Blame.HARDWARE,
        "listing: hardware or the driver; catalog: contact support",
        {92: "a high rate of corrected memory errors"},
    ),
    (
        Blame.ADMIN,
        "catalog: check the board",
        {54: "the board has no auxiliary power"},
    ),
    (
        Blame.ADMIN,
        "listing: hardware or the driver; catalog: unused since Ampere",
        {
            57: "the memory interface could not be initialised",
            58: "the memory interface is unstable",
        },
    ),
    (
        Blame.ADMIN,
        "listing: report it to NVIDIA and reset the GPU; catalog: unused since Ampere",
        {
            61: "a warning of the GPU's power controller",
            123: "the GPU's configuration memory could not be written",
        },
    ),
    (
        Blame.ADMIN,
        _IGNORE,
        {
            38: "an error in the driver's firmware",
            44: "a fault of the graphics engine during a context switch",
            93: "the GPU's configuration memory was written too often",
            121: "an error on the link to the CPU",
            137: "an NVLink access without privilege",
            141: "an error on CUDA's fast path",
            152: "an error in the deep learning accelerator's memory unit",
            153: "the deep learning accelerator did not answer in time",
            157: "a part of the GPU could not be retired",
            160: "a memory channel was retired",
            161: "a memory channel could not be retired",
        },
    ),
    (
        Blame.ADMIN,
        "catalog: the action depends on the kernel log",
        dict.fromkeys(range(144, 151), "an NVLink error"),
    ),
    (Blame.ADMIN, "catalog: update the software", {78: "a virtual GPU could not be started"}),
    (Blame.ADMIN, "catalog: restart the virtual machine", {151: "a key could not be changed"}),
    (Blame.ADMIN, "catalog: check unified memory", {159: "an error on the link to the CPU"}),
    (
        Blame.ADMIN,
        "catalog: reset the GPU, and investigate the user's software",
        {155: "a software-defined NVLink error"},
    ),
    (
        Blame.ADMIN,
        "catalog: no action",
        {
            164: "the power smoothing circuit is near the end of its life",
            165: "the power smoothing circuit is at the end of its life",
            166: "NVLink traffic before encryption was set up",
            167: "the PCIe link did not answer in time",
            168: "the GPU has less memory than it should",
            169: "the GPU's security controller halted",
            170: "an interrupt of an encrypted NVLink",
        },
    ),
    (
        Blame.UNKNOWN,
        "catalog: ignore",
        dict.fromkeys((106, 107), "a test message of the management bus"),
    ),
    (
        Blame.UNKNOWN,
        "catalog: details of another XID, or a change of state",
        {
            154: "the recovery action that the driver requests has changed",
            162: "power smoothing was enabled",
            163: "power smoothing was disabled",
            171: "XID 48 was in the GPU's memory",
            172: "XID 48 was in the GPU's caches",
        },
    ),
)

XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        number: Xid(blame, what, source)
        for blame, source, numbers in _ROWS
        for number, what in numbers.items()
    }
)
NOT_LISTED = Xid(Blame.ADMIN, "see NVIDIA's list of XID errors", "not in the table")
