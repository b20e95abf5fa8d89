"""How the line of %gpulease is read."""

import pytest

from goldens import mentions
from gpulease.errors import BadUsage
from gpulease.lease_api import magic
from gpulease.lease_api.magic import read_line


def test_options_are_the_arguments_of_lease() -> None:
    words = ["4G", "--gpus", "2", "--exclusive", "--time", "8h", "--name=nb", "--min-vram", "40G"]
    assert read_line(words) == (
        "4G",
        {"gpus": 2, "exclusive": True, "time_limit": "8h", "name": "nb", "min_vram": "40G"},
    )
    assert read_line(["--wait", "0"]) == (None, {"wait": "0"})
    assert read_line(["--mem", "4G", "--gpu-model", "A100"]) == ("4G", {"gpu_model": "A100"})
    assert read_line(["--split", "2", "40%"]) == ("40%", {"split": 2})


@pytest.mark.parametrize(
    "line", ["4G 5G", "--what", "--client x", "--gpus", "4G --mem 3G", "--mem 3G 4G"]
)
def test_what_cannot_be_understood_is_refused(line: str) -> None:
    with pytest.raises(BadUsage) as refused:
        read_line(line.split())
    assert refused.value.hint


def test_help_lists_the_options() -> None:
    shown = magic._answer(["--help"])
    assert mentions(shown, "%gpulease release", "--mem", "--time,", "--gpu-model")
