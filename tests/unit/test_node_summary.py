"""What an admin, or another version, may have written into the field Extra of a node."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.slurm.annotations import GpuSummary, NodeSummary, decode, encode, nodes_in
from gpulease.slurm.command.views import views_of

_NUMBERS = st.integers(0, 1 << 52)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_GPUS = st.builds(
    GpuSummary, _NUMBERS, _TEXT, _TEXT, _TEXT,
    **dict.fromkeys(("total", "allocatable", "leased", "used", "unmanaged"), st.none() | _NUMBERS),
    local=st.booleans(), detail=st.none() | _TEXT,
)  # fmt: skip
_SUMMARIES = st.builds(
    NodeSummary, st.floats(0, 1 << 35), st.integers(1, 1 << 40), st.tuples(_GPUS), version=_TEXT,
    publish_every=st.floats(0, 1e9), learnt=st.dictionaries(_TEXT, _NUMBERS),
)  # fmt: skip
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["\ud800", 10**400, -1])
)  # fmt: skip
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)
_FIELDS = sorted(NodeSummary.__annotations__)
_GPU_FIELDS = sorted(GpuSummary.__annotations__)


@given(_SUMMARIES)
def test_a_summary_is_read_as_it_was_written(summary: NodeSummary) -> None:
    text = encode(summary)
    assert " " not in text
    assert decode(text) == summary


@given(_SUMMARIES, st.sampled_from(_FIELDS), st.sampled_from(_GPU_FIELDS), _JSON, st.booleans())
def test_any_other_value_is_read_or_ignored(
    summary: NodeSummary, field: str, gpu_field: str, value: Any, of_gpu: bool
) -> None:
    written = json.loads(encode(summary))
    (written["gpus"][0] if of_gpu else written)[gpu_field if of_gpu else field] = value
    text = json.dumps(written).replace(" ", "\\u0020")
    read = decode(text)
    [node] = views_of(
        nodes_in(f"NodeName=n1 Gres=shard:4 State=IDLE Extra={text}"), datetime.now(UTC)
    )
    assert (node.shard is None) == (read is None)
    assert read is None or decode(encode(read)) == read


@pytest.mark.parametrize(
    "text",
    [None, "", "rack 7", "[1]", '{"gpus":3}', "[" * 99_999, '{"gpus":[],"at":1,"shard":0}',
     '{"gpus":[],"at":NaN,"shard":1}', '{"gpus":[],"at":true,"shard":1}'],
)  # fmt: skip
def test_other_text_is_no_summary(text: str | None) -> None:
    assert decode(text) is None
