"""What `import gpulease` gives: light, typed, and nothing but the public names."""

import subprocess
import sys
import traceback
from pathlib import Path
from textwrap import dedent

import pytest

import gpulease

REPOSITORY = Path(__file__).parents[2]
USER = """
    from typing import assert_type

    import gpulease
    from gpulease import Client, Executor, Lease, lease
    from gpulease.errors import NoRoomNow
    from gpulease.wire import ClaimRequest, JobView, SubmitRequest, to_wire

    with gpulease.lease("4G", gpus=2, wait="30m") as mine:
        assert_type(mine, Lease)
        assert_type(mine.memory, int)
        assert_type(mine.gpus[0].uuid, str)
    try:
        lease(None, wait=0).release()
    except (NoRoomNow, gpulease.errors.AlreadyClaimed) as error:
        assert_type(error.hint, str | None)
    assert_type(Client().status().gpus[0].memory.headroom, int | None)
    request = SubmitRequest([to_wire("true")], "/", {}, claim=ClaimRequest(memory=2**30))
    assert_type(Client().submit(request), JobView)
    with Executor("4G", time_limit="1h") as pool:
        assert_type(pool.submit(pow, 2, 3).result(), int)
"""
WRONG = {
    "gpulease.lease(memory=4.5)": "arg-type",
    'gpulease.lease("4G", visible="name")': "arg-type",
    'gpulease.lease("4G", 2)': "call-arg",
    "gpulease.leese": "attr-defined",
}


def test_a_type_checker_knows_the_api_and_sees_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(dedent(USER) + "\n".join(WRONG))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "user.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    errors = [line for line in ran.stdout.splitlines() if " error: " in line]
    assert [line.rpartition("[")[2].rstrip("]") for line in errors] == list(WRONG.values())


@pytest.mark.parametrize("name", gpulease.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(gpulease, name) is not None
    assert name in dir(gpulease)


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gpulease' has no attribute 'leese'"):
        gpulease.leese  # type: ignore[attr-defined]  # noqa: B018


def test_a_traceback_shows_the_hint() -> None:
    error = gpulease.errors.BadValue("cannot read it: it is odd", "write it so")
    assert "hint: write it so" in "".join(traceback.format_exception(error))
    assert str(error) == "cannot read it: it is odd"
