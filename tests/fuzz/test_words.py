"""Sizes, times, names, settings, whole submissions: taken, or refused by name; never a failure."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzz import examples
from gpulease.config import Settings, read_settings
from gpulease.daemon.app import checked
from gpulease.domain.job import Process
from gpulease.errors import BadConfiguration, BadValue, NotAllowed, TooLarge
from gpulease.server import validation
from gpulease.server.auth import Caller
from gpulease.server.holds import hold_submission_of
from gpulease.server.job_requests import submission_of
from gpulease.server.validation import Defaults
from gpulease.service.ports import LivingProcess
from gpulease.units import (
    GIB,
    format_span,
    parse_span,
)
from gpulease.wire import ranges
from gpulease.wire.requests import (
    ClaimRequest,
    EarlySignalRequest,
    HoldRequest,
    SubmitRequest,
    TerminalRequest,
    WorkerOptionsRequest,
    from_wire,
    to_wire,
)

_LIKE_SIZES = st.from_regex(r"\A\s?-?\d{0,25}(\.\d{0,25})? ?[kKmMgGtTpP%]?(i?[bB])?\s?\Z")
_LIKE_SPANS = st.from_regex(r"\A(\d{0,12}d)?(\d{0,12}h)?(\d{0,12}:\d{0,3}:?)?(\d{0,12}[ms]?)?\Z")


@examples(300)
@given(st.text(max_size=60) | _LIKE_SPANS)
def test_a_time_is_a_span_or_refused(text: str) -> None:
    try:
        assert timedelta(0) < parse_span(text) <= timedelta(days=3650)
    except BadValue as error:
        assert error.message.isprintable()


@examples(300)
@given(st.timedeltas(timedelta(seconds=1), timedelta(days=3650)))
def test_a_time_that_is_shown_can_be_asked_for_and_is_not_longer(span: timedelta) -> None:
    whole = timedelta(seconds=int(span.total_seconds()))
    again = parse_span(format_span(span).replace(" ", ""))
    assert timedelta(0) <= whole - again <= whole / 20


@examples(200)
@given(st.text(max_size=200))
def test_a_name_is_kept_as_it_is_or_refused(text: str) -> None:
    with suppress(BadValue):
        assert ranges.checked_name(text) == text
        assert text.isprintable()
    assert validation.clean(text).isprintable()


@examples(200)
@given(st.binary(max_size=200))
def test_bytes_go_over_the_wire_and_come_back(data: bytes) -> None:
    text = os.fsdecode(data)
    assert from_wire(to_wire(text)) == text
    with suppress(BadValue):
        assert validation.bytes_string("argument", to_wire(text)) == text


_KEYS = st.sampled_from([*Settings.__dataclass_fields__, "colour"])
_VALUES = st.one_of(
    _LIKE_SIZES, _LIKE_SPANS, st.text(max_size=20), st.integers(), st.booleans(), st.floats(),
    st.sampled_from(["0", "1s", "4G", "50%", "2x8G", "/run/x"]),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip


def _is_settings_or_refused(path: Path) -> None:
    with suppress(BadConfiguration):
        found = checked(read_settings(path, Settings(), {}))
        assert isinstance(found, Settings)
        assert b"\0" not in os.fsencode(found.socket) + os.fsencode(found.state)


@examples(200)
@given(st.dictionaries(_KEYS, _VALUES, max_size=4))
@example({"socket": "\0"})
@example({"margin": 10**5000})
def test_settings_are_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, given_: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    with suppress(UnicodeEncodeError, ValueError):
        path.write_text("".join(f"{key} = {json.dumps(it)}\n" for key, it in given_.items()))
    _is_settings_or_refused(path)


@examples(100)
@given(st.binary(max_size=300))
def test_a_file_that_is_no_toml_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.toml"
    path.write_bytes(content)
    _is_settings_or_refused(path)


_NUMBERS = st.integers() | st.integers(-2, 100) | st.sampled_from([1 << 30, 1 << 60, 1 << 63])
_FLOATS = st.floats() | st.floats(0, 1000)
_WORDS = st.text(max_size=20) | st.text(st.characters(max_codepoint=255), max_size=20)
_NAMES = _WORDS | st.sampled_from(["RLIMIT_NOFILE", "RLIMIT_\u0661", "A", "A=B", ""])
_CLAIMS = st.builds(
    ClaimRequest,
    memory=st.none() | _NUMBERS, share=st.none() | _FLOATS, gpus=_NUMBERS,
    exclusive=st.booleans(), time_limit=st.none() | _FLOATS,
)  # fmt: skip
_OPTIONS = st.builds(
    WorkerOptionsRequest,
    split=_NUMBERS, inter_op_threads=st.none() | _NUMBERS, intra_op_threads=st.none() | _NUMBERS,
)  # fmt: skip
_SUBMISSIONS = st.builds(
    SubmitRequest,
    argv=st.lists(_WORDS, max_size=4), cwd=_WORDS.map(lambda it: f"/{it}") | _WORDS,
    environment=st.dictionaries(_NAMES, _WORDS, max_size=3), umask=_NUMBERS,
    soft_limits=st.dictionaries(_NAMES, _NUMBERS, max_size=3), nice=_NUMBERS, claim=_CLAIMS,
    options=_OPTIONS, name=st.none() | _WORDS, wait=st.none() | _FLOATS,
    terminal=st.none() | st.builds(
        TerminalRequest, rows=_NUMBERS, columns=_NUMBERS,
        attributes=st.none() | st.lists(_NUMBERS, max_size=40),
    ),
    early_signal=st.none() | st.builds(EarlySignalRequest, signal=_NUMBERS, before=_FLOATS),
    grace=st.none() | _FLOATS,
)  # fmt: skip
_CALLER, _DEFAULTS = Caller(1, 54321, 54321, (54321,)), Defaults(4 * GIB)
_SOUND = {"umask": 0o022, "nice": 0, "options": WorkerOptionsRequest(), "claim": ClaimRequest(),
          "environment": {}, "argv": ["true"], "cwd": "/", "soft_limits": {}}  # fmt: skip


@examples(400)
@given(_SUBMISSIONS, st.sets(st.sampled_from(sorted(_SOUND))))
def test_a_submission_is_an_order_or_refused(asked: SubmitRequest, mended: set[str]) -> None:
    asked = replace(asked, **{name: _SOUND[name] for name in mended})
    try:
        order = submission_of(asked, _CALLER, _DEFAULTS)
    except (BadValue, TooLarge) as error:
        assert error.message
        assert error.message.isprintable(), error.message
        return
    assert order.name.isprintable()
    assert order.command.isprintable()
    assert not [each for each in order.invocation.argv if "\0" in each]


def _living(pid: int) -> LivingProcess | None:
    return LivingProcess(Process(pid, 1, "boot"), 54321, "name") if pid % 2 else None


@examples(200)
@given(
    st.builds(
        HoldRequest,
        environment=st.dictionaries(_NAMES, _WORDS, max_size=2), pid=st.none() | _NUMBERS,
        claim=_CLAIMS, options=_OPTIONS, name=st.none() | _WORDS, wait=st.none() | _FLOATS,
    ),
    st.sets(st.sampled_from(["claim", "options", "environment"])),
)  # fmt: skip
def test_a_lease_is_an_order_or_refused(asked: HoldRequest, mended: set[str]) -> None:
    asked = replace(asked, **{name: _SOUND[name] for name in mended})
    try:
        order = hold_submission_of(asked, _CALLER, _DEFAULTS, _living)
    except (BadValue, TooLarge, NotAllowed) as error:
        assert error.message.isprintable(), error.message
        return
    assert order.command.isprintable()
