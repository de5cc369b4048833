"""What a running server says of itself at /metrics and /v1/models."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECONDS = 5.0
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Scrape:
    """Samples by name; several of one name differ in their labels. `failure` says why there are none."""

    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]
    failure: str = ""
    max_model_len: int | None = None

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over engines of the samples that carry these labels; None if there is none."""
        found = [value for have, value in self.samples.get(name, ()) if all(have.get(key) == want for key, want in labels.items())]
        return sum(found) if found else None

    def largest(self, name: str) -> float | None:
        """The largest over engines."""
        return max((value for _, value in self.samples.get(name, ())), default=None)

    @property
    def has_plugin(self) -> bool:
        return any(name.startswith("sparsekv_") for name in self.samples)


def scrape(url: str, key: str = "") -> Scrape:
    """Reads a server's metrics, and the context length of the model it serves.

    Args:
        url: the server's address, with or without `/v1` or `/metrics` behind it.
        key: sent where it is set.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return Scrape({}, "the package prometheus-client is missing")
    base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    try:
        text = _get(f"{base}/metrics", key).decode("utf-8", "replace")
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except urllib.error.HTTPError as error:
        return Scrape({}, f"{base}/metrics answers {error.code} {error.reason}")
    except (OSError, ValueError) as error:
        return Scrape({}, f"{base}/metrics: {getattr(error, 'reason', error)}")
    length = None
    try:
        models: Any = json.loads(_get(f"{base}/v1/models", key))
        length = int(models["data"][0]["max_model_len"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass
    return Scrape({name: tuple(found) for name, found in samples.items()}, max_model_len=length)


def _get(url: str, key: str) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError("an address starts with http:// or https://")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read(MAX_BYTES)
