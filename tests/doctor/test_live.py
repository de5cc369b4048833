"""Rules on what a running server says of itself."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from sparsekv_cli.doctor.check import Level
from sparsekv_cli.doctor.checks import (
    LIVE,
    live_coverage,
    live_hot_hits,
    live_pool,
    live_preemptions,
    live_prefix_cache,
    live_server,
    live_speculation,
    live_vram,
    live_waiting,
)
from sparsekv_cli.doctor.metrics import Scrape, scrape

pytest.importorskip("prometheus_client")
Make = Callable[..., Any]

HEALTHY: dict[str, float] = {
    'vllm:num_requests_running{engine="0"}': 8,
    'vllm:num_requests_waiting{engine="0"}': 0,
    'vllm:num_preemptions_total{engine="0"}': 0,
    'vllm:request_success_total{engine="0",finished_reason="stop"}': 90,
    'vllm:request_success_total{engine="0",finished_reason="length"}': 10,
    'vllm:generation_tokens_total{engine="0"}': 90000,
    'vllm:prefix_cache_queries_total{engine="0"}': 4e6,
    'vllm:prefix_cache_hits_total{engine="0"}': 3.2e6,
    'vllm:spec_decode_num_draft_tokens_total{engine="0"}': 30000,
    'vllm:spec_decode_num_accepted_tokens_total{engine="0"}': 21000,
    'sparsekv_decode_selected_tokens_total{engine="0"}': 2.4e9,
    'sparsekv_decode_context_tokens_total{engine="0"}': 2.0e11,
    'sparsekv_decode_selections_total{engine="0"}': 1e6,
    'sparsekv_decode_selected_mass_total{engine="0"}': 0.981e6,
    'sparsekv_decode_requests_total{engine="0",path="sparse"}': 80000,
    'sparsekv_decode_requests_total{engine="0",path="dense"}': 500,
    'sparsekv_hot_rows_total{engine="0",result="hit"}': 2.2e9,
    'sparsekv_hot_rows_total{engine="0",result="miss"}': 2e8,
    'sparsekv_pool_tokens{engine="0",state="used"}': 1.4e6,
    'sparsekv_pool_tokens{engine="0",state="free"}': 0.6e6,
    'sparsekv_pool_cached_tokens{engine="0"}': 1.9e6,
}


class Server(ThreadingHTTPServer):
    samples: dict[str, float]
    model_len: int | None
    key: str
    status: int
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        owner = self.server
        if owner.key and self.headers.get("Authorization") != f"Bearer {owner.key}":
            return self.send_error(401)
        if self.path == "/metrics":
            body = "".join(f"{name} {value}\n" for name, value in owner.samples.items())
        elif self.path == "/v1/models" and owner.model_len:
            body = json.dumps({"data": [{"id": "qwen", "max_model_len": owner.model_len}]})
        else:
            return self.send_error(404)
        self.send_response(owner.status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as owner:
        owner.samples, owner.model_len, owner.key, owner.status = dict(HEALTHY), 262144, "", 200
        threading.Thread(target=owner.serve_forever, daemon=True).start()
        yield owner
        owner.shutdown()


@pytest.fixture
def look(make_machine: Make, make_profile: Make, server: Server, run: Make) -> Make:
    """What one check finds at the fake server, after changes to its samples (None removes one)."""

    def go(module: Any, changes: dict[str, float | None] | None = None, **settings: Any) -> list[Any]:
        server.samples = {name: value for name, value in {**HEALTHY, **(changes or {})}.items() if value is not None}
        url = f"http://127.0.0.1:{server.server_port}/v1/"
        return run(module.CHECK, make_machine(profile=make_profile(**settings), url=url))

    return go


def levels(findings: list[Any]) -> list[Level]:
    return [finding.level for finding in findings]


def without(prefix: str) -> dict[str, float | None]:
    return {name: None for name in HEALTHY if name.startswith(prefix)}


def named(name: str, value: float | None, **labels: str) -> dict[str, float | None]:
    """A change of the sample with this name and these labels."""
    fitting = [key for key in HEALTHY if key.startswith(name + "{") and all(f'{k}="{v}"' in key for k, v in labels.items())]
    assert fitting, name
    return dict.fromkeys(fitting, value)


def test_all_is_well(look: Make) -> None:
    for module in (
        live_server,
        live_waiting,
        live_pool,
        live_hot_hits,
        live_coverage,
        live_preemptions,
        live_prefix_cache,
        live_speculation,
    ):
        assert levels(look(module)) == [Level.OK], module.__name__
    assert look(live_hot_hits)[0].summary == "hot-hit rate 92%"
    assert look(live_coverage)[0].summary == "coverage 0.981 with 1.2% of the rows"


def test_hot_hits(look: Make) -> None:
    assert levels(look(live_hot_hits, named("sparsekv_hot_rows_total", 9e9, result="miss"))) == [Level.WARN]
    assert levels(look(live_hot_hits, named("sparsekv_hot_rows_total", 9e8, result="miss"))) == [Level.INFO]
    few = named("sparsekv_hot_rows_total", 10)
    assert levels(look(live_hot_hits, few)) == [Level.INFO]
    assert levels(look(live_hot_hits, without("sparsekv_hot"))) == [Level.SKIP]


def test_coverage(look: Make) -> None:
    low = named("sparsekv_decode_selected_mass_total", 0.9e6)
    assert levels(look(live_coverage, low)) == [Level.WARN]
    assert levels(look(live_coverage, low, validation__recall_mean="0.85")) == [Level.OK]
    assert levels(look(live_coverage, named("sparsekv_decode_selected_tokens_total", 0.9e11))) == [Level.INFO]
    none = named("sparsekv_decode_selections_total", 0)
    assert levels(look(live_coverage, none)) == [Level.SKIP]
    dense = none | named("sparsekv_decode_requests_total", 0, path="sparse")
    assert "were dense" in look(live_coverage, dense)[0].summary


def test_preemptions(look: Make) -> None:
    assert levels(look(live_preemptions, named("vllm:num_preemptions_total", 3))) == [Level.INFO]
    assert levels(look(live_preemptions, named("vllm:num_preemptions_total", 30))) == [Level.WARN]
    assert levels(look(live_preemptions, without("vllm:num_preemptions"))) == [Level.SKIP]


def test_prefix_cache(look: Make) -> None:
    assert levels(look(live_prefix_cache, named("vllm:prefix_cache_hits_total", 0))) == [Level.WARN]
    assert levels(look(live_prefix_cache, named("vllm:prefix_cache_queries_total", 0))) == [Level.SKIP]
    few = named("vllm:prefix_cache_queries_total", 900) | named("vllm:prefix_cache_hits_total", 0)
    assert levels(look(live_prefix_cache, few)) == [Level.INFO]


def test_waiting(look: Make) -> None:
    assert levels(look(live_waiting, named("vllm:num_requests_waiting", 3))) == [Level.INFO]
    reason = {'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"}': 20.0}
    (finding,) = look(live_waiting, named("vllm:num_requests_waiting", 20) | reason)
    assert finding.level is Level.WARN
    assert finding.evidence[-1] == "waiting for capacity: 20"
    stuck = named("vllm:num_requests_waiting", 1) | named("vllm:num_requests_running", 0)
    assert "none runs" in look(live_waiting, stuck)[0].summary


def test_pool(look: Make) -> None:
    assert levels(look(live_pool, named("sparsekv_pool_tokens", 1e3, state="free"))) == [Level.WARN]
    assert levels(look(live_pool, without("sparsekv_pool_tokens"))) == [Level.SKIP]


def test_speculation(look: Make) -> None:
    assert levels(look(live_speculation, named("vllm:spec_decode_num_accepted_tokens_total", 900))) == [Level.WARN]
    none = without("vllm:spec_decode")
    assert levels(look(live_speculation, none)) == [Level.SKIP]
    wanted = {"speculation__method": "ngram", "speculation__tokens": "3"}
    assert levels(look(live_speculation, none, **wanted)) == [Level.ERROR]


def test_free_memory_of_the_cards(make_machine: Make, run: Make, card: dict[str, str], second_card: dict[str, str]) -> None:
    def at(url: str = "http://127.0.0.1:8000", **cards: Any) -> Any:
        machine = make_machine(url=url, **cards)
        machine.__dict__["metrics"] = Scrape({})
        return machine

    assert levels(run(live_vram.CHECK, at())) == [Level.OK]
    (finding,) = run(live_vram.CHECK, at(cards=[card, second_card | {"memory.used": "24176 MiB"}]))
    assert (finding.level, finding.evidence[0][-7:]) == (Level.WARN, "400 MiB")
    assert levels(run(live_vram.CHECK, at(cards=[card | {"memory.used": "[N/A]"}]))) == [Level.UNKNOWN]
    assert levels(run(live_vram.CHECK, at("http://10.0.0.4:8000"))) == [Level.SKIP]


def test_a_server_without_the_plugin(look: Make) -> None:
    (finding,) = look(live_server, without("sparsekv"))
    assert "without sparsekv" in finding.summary
    (finding,) = look(live_server, dict.fromkeys(HEALTHY))
    assert "not vLLM" in finding.summary


def test_another_context_length(look: Make, server: Server) -> None:
    server.model_len = 32768
    assert levels(look(live_server)) == [Level.OK, Level.WARN]
    server.model_len = None
    assert levels(look(live_server)) == [Level.OK]


def test_no_server_and_a_key(make_machine: Make, server: Server, run: Make) -> None:
    (finding,) = run(live_server.CHECK, make_machine(url="http://127.0.0.1:9"))
    assert finding.level is Level.ERROR
    assert "refused" in finding.summary
    server.key = "secret-key-0123456789"
    url = f"http://127.0.0.1:{server.server_port}"
    assert "401" in scrape(url).failure
    assert scrape(url, server.key).failure == ""
    assert levels(run(live_server.CHECK, make_machine(url=url, environ={"SPARSEKV_API_KEY": server.key}))) == [Level.OK]
    assert "http://" in scrape("file:///etc/passwd").failure
    for check in LIVE[1:]:
        assert Level.OK not in levels(run(check, make_machine(url="http://127.0.0.1:9"))), check.id


def test_several_engines_are_added_up(server: Server) -> None:
    server.samples = {f'vllm:num_requests_running{{engine="{n}"}}': n + 1.0 for n in range(3)}
    found = scrape(f"http://127.0.0.1:{server.server_port}/metrics")
    assert found.total("vllm:num_requests_running") == 6
    assert found.total("vllm:num_requests_running", engine="1") == 2
    assert found.largest("vllm:num_requests_running") == 3
    assert found.total("absent") is None


def test_the_names_are_those_of_engine_and_vllm() -> None:
    """A metric that is renamed there must not silently become `skip` here."""
    folder = Path(live_server.__file__).parent
    used = set()
    for path in folder.glob("live_*.py"):
        used |= set(re.findall(r'"((?:vllm:|sparsekv_)[a-z_]+)"', path.read_text()))
        used |= {f"vllm:prefix_cache_{name}_total" for name in ("queries", "hits") if "prefix" in path.name}
    used.discard("sparsekv_")
    engine = (Path(__file__).parents[2] / "engine/metrics.py").read_text()
    assert len(used) > 15
    for name in used:
        if name.startswith("sparsekv_"):
            assert f'"{name}"' in engine, name
    spec = util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return
    root = Path(spec.origin).parent / "v1"
    known = (root / "metrics/loggers.py").read_text() + (root / "spec_decode/metrics.py").read_text()
    for name in used:
        if name.startswith("vllm:"):
            assert f'"{name.removesuffix("_total")}"' in known, name
