"""How little was read, and how much of the attention that was; by the engine's own counters."""

from __future__ import annotations

from .data import Window
from .declare import Value, metric

_REQUESTS = ("sparsekv_decode_requests_total{path=sparse}", "sparsekv_decode_requests_total{path=dense}")
_HOT = ("sparsekv_hot_rows_total{result=hit}", "sparsekv_hot_rows_total{result=miss}")
_BYTES = ("sparsekv_host_read_bytes_total{path=sparse}", "sparsekv_host_read_bytes_total{path=dense}")


@metric("Context read per sparse step", "%", "", 2)
def read_share(window: Window) -> Value:
    """Rows attended to / rows they were chosen from, over the sparse decode steps: sparsekv_decode_selected_tokens /
    sparsekv_decode_context_tokens."""
    return window.ratio("sparsekv_decode_selected_tokens_total", ["sparsekv_decode_context_tokens_total"])


@metric("Coverage", "%", "higher", 2)
def coverage(window: Window) -> Value:
    """Mean share of the attention mass that the selected rows hold, as the sketch estimates it: sparsekv_decode_selected_mass /
    sparsekv_decode_selections. An estimate; recall is measured by asking."""
    return window.ratio("sparsekv_decode_selected_mass_total", ["sparsekv_decode_selections_total"])


@metric("Sparse steps", "%", "")
def sparse_steps(window: Window) -> Value:
    """Request-steps decoded by sparse attention / all request-steps decoded."""
    if window.counter(_REQUESTS[0]) is None and window.counter(_REQUESTS[1]) is not None:
        return 0.0
    return window.ratio(_REQUESTS[0], _REQUESTS)


@metric("Hot-set hits", "%", "higher")
def hot_hits(window: Window) -> Value:
    """Selected rows found in the GPU's hot set / rows looked up."""
    return window.ratio(
        "sparsekv_hot_rows_total{result=hit}", ["sparsekv_hot_rows_total{result=hit}", "sparsekv_hot_rows_total{result=miss}"]
    )


@metric("Host bytes read per output token", "B/tok", "lower", 0)
def host_bytes_per_token(window: Window) -> Value:
    """Growth of sparsekv_host_read_bytes, sparse and dense paths, / output tokens in the window."""
    read = [value for name in _BYTES if (value := window.counter(name)) is not None]
    tokens = window.output_tokens()
    return sum(read) / tokens if read and tokens else None
