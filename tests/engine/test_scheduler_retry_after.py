"""503 with Retry-After, over vLLM's own exceptions and handlers."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

from sparsekv.engine.retry_after import RetryAfter


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    init_exception_handler(app)
    app.state.args = Namespace(log_error_stack=False)
    app.add_middleware(RetryAfter)

    @app.post("/requests")
    def too_many_requests():
        raise QueueOverflowError

    @app.post("/tokens")
    def too_many_tokens():
        raise MaxQueuedTokensError

    @app.post("/upstream")
    def has_one():
        return Response(status_code=503, headers={"Retry-After": "120"})

    @app.post("/fine")
    def fine():
        return {"answer": 42}

    @app.get("/health")
    def dead():
        raise HTTPException(503)

    return TestClient(app)


@pytest.mark.parametrize("path", ["/requests", "/tokens"])
def test_a_full_queue_says_when_to_come_back(client: TestClient, path: str) -> None:
    answer = client.post(path)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "15"
    assert "try again later" in answer.json()["error"]["message"]


def test_the_profile_sets_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv.engine import retry_after
    from sparsekv.engine.prefill_plan import SchedulerSettings

    class Config:
        scheduler = SchedulerSettings(retry_after_s=40)

    monkeypatch.setenv("SPARSEKV_PROFILE", "resolved.json")
    monkeypatch.setattr(retry_after, "active_config", Config)
    assert RetryAfter(FastAPI()).seconds == "40"


def test_other_answers_are_left_alone(client: TestClient) -> None:
    assert "Retry-After" not in client.post("/fine").headers
    assert "Retry-After" not in client.get("/health").headers
    assert "Retry-After" not in client.post("/nowhere").headers
    assert client.post("/upstream").headers["Retry-After"] == "120"
