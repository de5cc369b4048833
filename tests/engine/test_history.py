"""Staging of histories: order, ring discipline, layers that do not run. Streams and events are replaced by a log."""

import contextlib
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from sparsekv.engine import history
from sparsekv.engine.history import BUFFERS, SEGMENT_TOKENS, HistoryPipeline, plan_segments, segment_lengths


class FakeEvent:
    log: ClassVar[list] = []

    def record(self) -> None:
        self.log.append(("record", self))

    def wait(self) -> None:
        self.log.append(("wait", self))


@pytest.fixture
def log(monkeypatch):
    FakeEvent.log = []
    monkeypatch.setattr(history.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(history.torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(history.torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(history, "SEGMENT_TOKENS", 4)
    return FakeEvent.log


def row_values(segment):
    """What `stage` writes: each row names its layer, request and token."""
    return segment.layer * 1000 + segment.request * 100 + torch.arange(segment.start, segment.end)


def pipeline(log):
    def stage(segment, key, value):
        log.append(("stage", segment))
        key[: segment.end - segment.start] = row_values(segment).view(-1, 1, 1)

    return HistoryPipeline(1, 2, torch.float32, torch.device("cpu"), stage)


def test_segments_cover_each_history_once_layer_by_layer():
    histories = [(3, 1), (5, SEGMENT_TOKENS), (6, 2 * SEGMENT_TOKENS + 7)]
    segments = plan_segments(2, histories)
    assert [s.layer for s in segments] == sorted(s.layer for s in segments)
    for layer in range(2):
        for request, tokens in histories:
            mine = [s for s in segments if (s.layer, s.request) == (layer, request)]
            assert [s.end - s.start for s in mine] == segment_lengths(tokens)
            assert mine[0].start == 0
            assert mine[-1].end == tokens
            assert all(a.end == b.start for a, b in pairwise(mine))


def test_every_segment_arrives_with_its_rows(log):
    pipe = pipeline(log)
    for histories in ([(0, 9)], [(1, 3), (2, 4)]):  # two steps reuse the ring
        segments = plan_segments(3, histories)
        pipe.begin(segments)
        for expected in segments:
            segment, key, _ = pipe.take()
            assert segment == expected
            assert key[:, 0, 0].tolist() == row_values(expected).tolist()
            pipe.release()


def test_a_buffer_is_staged_again_only_after_its_reader_released_it(log):
    pipe = pipeline(log)
    segments = plan_segments(4, [(0, 8)])
    pipe.begin(segments)
    staged = [entry for entry in log if entry[0] == "stage"]
    assert len(staged) == BUFFERS  # ahead, but no further than the ring
    for i in range(len(segments)):
        pipe.take()
        assert sum(entry[0] == "stage" for entry in log) == min(len(segments), i + BUFFERS)
        pipe.release()


def test_a_layer_that_does_not_run_is_skipped(log):
    pipe = pipeline(log)
    segments = plan_segments(3, [(0, 6)])
    pipe.begin(segments)
    pipe.skip_to(2)
    segment, _, _ = pipe.take()
    assert segment.layer == 2
    pipe.release()
    pipe.begin(segments)  # the rest of the step before is dropped
    assert pipe.take()[0] == segments[0]
