from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.bench.swarm.sse import EventParser

STREAM = ': hello\n\ndata: {"a": "tö中"}\r\n\r\ndata:1\rdata: 2\r\revent: x\nid: 4\ndata: [DONE]\n\n:\n\ndata: cut'.encode()
EVENTS = ['{"a": "tö中"}', "1\n2", "[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_packets_may_end_anywhere(cuts: list[int]) -> None:
    """Also inside a UTF-8 character and between CR and LF."""
    parser, events = EventParser(), []
    ends = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(ends):
        events += parser.feed(STREAM[start:end])
    assert events == EVENTS
    assert parser.comments == 2


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_any_bytes_are_survived(chunks: list[bytes]) -> None:
    parser = EventParser()
    for chunk in chunks:
        parser.feed(chunk)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_line_endings(ending: bytes) -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1" + ending * 2 + b"data: 2" + ending * 2 + b"x" + ending) == ["1", "2"]
