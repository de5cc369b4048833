"""Tells a client that was turned away when to come back.

`--middleware sparsekv.engine.retry_after.RetryAfter`. vLLM answers 503 at once where `--max-num-queued-reqs` or
`--max-num-queued-tokens` is exceeded, before a stream begins, but says nothing of when to try again: agents then retry
in a loop or give up.
"""

from __future__ import annotations

import os
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import PROFILE_ENV, active_config
from .prefill_plan import SchedulerSettings


class RetryAfter:
    """Adds `Retry-After: scheduler.retry_after_s` to each answer 503 to a POST, unless it has that header.

    Only requests for work are posted: a 503 of `/health` means a dead engine and no time helps.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        settings = active_config().scheduler if os.environ.get(PROFILE_ENV) else SchedulerSettings()
        self.seconds = str(settings.retry_after_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add_header(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(scope=message).setdefault("Retry-After", self.seconds)
            await send(message)

        is_post = scope["type"] == "http" and scope["method"] == "POST"
        await self.app(scope, receive, add_header if is_post else send)
