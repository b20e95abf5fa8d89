"""What each XID of NVIDIA's driver means and whose fault it is: a table, with sources.

A GPU is drained for an XID only if NVIDIA asks for a reset, a reboot or a repair, and does not
name the user's program among the causes. Otherwise any user could take a GPU from the others.
Where a program's fault does leave a GPU in need of a reset, the driver says so in its recovery
action, which drains the GPU whatever the XID was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Blame(StrEnum):
    """Whose fault an error is."""

    APPLICATION = "application"
    """A program did it, and the GPU is as well as before."""
    CONTAINED = "contained"
    """The hardware failed, and the driver has ended the programs that it touched."""
    HARDWARE = "hardware"
    AVOIDED = "avoided"
    """The hardware failed somewhere, and the driver keeps programs off it until a reset."""
    GONE = "gone"
    """The GPU does not answer any more, which keeps new leases off it without our doing."""
    ADMIN = "admin"
    """Nobody can tell from this alone. An admin has to look; nothing is drained for it."""
    UNKNOWN = "unknown"
    """Nobody's: it is kept and shown."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One row of the table."""

    blame: Blame
    what: str
    source: str
    """Where it is from: one of `SOURCES`, and what that says of it."""


SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "catalog": (
            'NVIDIA, "Analyzing Xid Errors with the Xid Catalog", the immediate action for each: '
            "<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, "
            "as of October 2025"
        ),
        "listing": (
            'NVIDIA, "XID Errors" for driver r555, the causes that its listing names: '
            "<https://docs.nvidia.com/deploy/xid-errors/index.html>"
        ),
        "plugin": (
            "NVIDIA's device plugin for Kubernetes, which ignores these as errors of applications: "
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
            8: "the GPU stopped processing a program's work",
            11: "an invalid stream of commands",
            13: "an exception in the graphics engine",
            25: "an illegal stream of commands",
            31: "a memory page fault",
            32: "an invalid stream of commands",
            60: "an exception in the video processor",
            69: "a program called the graphics engine wrongly",
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
            45: "a program's work was cleared away after an error",
        },
    ),
    (
        Blame.APPLICATION,
        (
            "plugin; listing: the application, among all others; catalog: reset the GPU, "
            "for which the driver asks by its recovery action"
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
        {94: "a memory error, contained by the driver"},
    ),
    (
        Blame.AVOIDED,
        "catalog: ignore; memory: new work may be started",
        {63: "a bad page or row of memory was put on record"},
    ),
    (
        Blame.HARDWARE,
        _RESET,
        {
            46: "the GPU stopped processing, and has to be reset",
            62: "the GPU's power controller halted",
            64: "a bad page or row of memory could not be put on record",
            95: "a memory error that was not contained",
            110: "a security fault in the GPU",
            119: "the GPU's system processor did not answer",
            120: "an error in the GPU's system processor",
            140: "a memory error that the driver could not deal with",
            143: "the GPU could not be initialised",
        },
    ),
    (
        Blame.HARDWARE,
        _RESET_ONLY,
        {
            136: "an NVLink could not be trained",
            156: "a part of the GPU is taken out of use at a reset",
            158: "the GPU did not answer in time",
        },
    ),
    (
        Blame.HARDWARE,
        "catalog: reset the GPU, or reboot; listing: hardware or the driver, not the application",
        {
            48: "a memory error that could not be corrected",
            74: "an NVLink error",
            79: "the GPU has fallen off the bus",
        },
    ),
    (
        Blame.HARDWARE,
        "listing: hardware or the driver; catalog: contact support",
        {92: "many memory errors that were corrected"},
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
            57: "the memory interface could not be set up",
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
            157: "a part of the GPU could not be taken out of use",
            160: "a channel of memory was taken out of use",
            161: "a channel of memory could not be taken out of use",
        },
    ),
    (
        Blame.ADMIN,
        "catalog: the action depends on what the kernel's log says",
        dict.fromkeys(range(144, 151), "an NVLink error"),
    ),
    (Blame.ADMIN, "catalog: update the software", {78: "a virtual GPU could not be started"}),
    (Blame.ADMIN, "catalog: restart the virtual machine", {151: "a key could not be changed"}),
    (Blame.ADMIN, "catalog: check unified memory", {159: "an error on the link to the CPU"}),
    (
        Blame.ADMIN,
        "catalog: reset the GPU, and investigate the user's software",
        {155: "an NVLink error that software defines"},
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
        "catalog: it tells more of another XID, or what became of the GPU",
        {
            154: "what the driver asks for to have the GPU well again has changed",
            162: "the power smoothing circuit is in use again",
            163: "the power smoothing circuit is out of use",
            171: "XID 48 was in the GPU's memory chips",
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
