"""What a daemon concludes from the crash of the last one."""

import pytest

from gpulease.daemon.foundation import crashed_in_nvml

_OTHER = 'Thread 0x01 (most recent call first):\n  File "{}", line 1 in call\n\n'
_CURRENT = "Fatal Python error: Segmentation fault\n\n{}Current " + _OTHER.replace("T", "t", 1)
_NVML, _SQLITE = "/x/gpulease/gpu/nvml_binding.py", "/x/sqlite3/__init__.py"


@pytest.mark.parametrize(
    ("text", "is_nvml"),
    [
        ("", False),
        (_CURRENT.format("", _NVML), True),
        (_CURRENT.format("", _SQLITE), False),
        (_CURRENT.format(_OTHER.format(_NVML), _SQLITE), False),
        (_CURRENT.format("", _SQLITE) + _OTHER.format(_NVML), False),
        # The readings of two GPUs crashed together, and the second ended the daemon at once.
        (_CURRENT.format(_OTHER.format(_SQLITE), _NVML).partition("Current")[0], True),
    ],
)
def test_a_crash_is_of_nvml_where_its_thread_called_it_or_two_threads_crashed(
    text: str, is_nvml: bool
) -> None:
    assert crashed_in_nvml(text) is is_nvml
