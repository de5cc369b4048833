"""What a long measurement has worked out so far, on disk, so that one that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from sparsekv.basis.format import write_atomically
from sparsekv.basis.heldout import Source
from sparsekv.basis.recall import Attention, Probe
from sparsekv.basis.stats import Observer

PARTS = ("query", "key", "positions")
"""Of an `Attention`, in its order."""


class LazySource:
    """Loads the model when a sequence is to be run, and not where everything is on disk already."""

    def __init__(self, load: Callable[[], Source]) -> None:
        self._load = load
        self._source: Source | None = None

    @property
    def config(self) -> Any:
        return self._loaded().config

    def run(self, tokens: list[int], observer: Observer) -> None:
        self._loaded().run(tokens, observer)

    def _loaded(self) -> Source:
        self._source = self._source or self._load()
        return self._source


class Work:
    """Files in `folder`, named after the hash of everything that they depend on."""

    def __init__(self, folder: Path, inputs: dict[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        self._folder = folder / digest[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sequences: list[Path] = []

    def once(self, name: str, compute: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The tensors of an earlier sitting, or else computed and kept."""
        path = self._folder / f"{name}.safetensors"
        if not path.is_file():
            write_atomically(path, save({key: tensor.contiguous() for key, tensor in compute().items()}))
        return load_file(path)

    def capture(self, index: int, source: Source, tokens: list[int], positions: Sequence[int]) -> None:
        """Keeps the queries at `positions` and all keys of one sequence."""

        def compute() -> dict[str, torch.Tensor]:
            tensors: dict[str, torch.Tensor] = {}

            def keep(layer: str, attention: Attention) -> None:
                tensors.update({f"{layer}.{part}": getattr(attention, part) for part in PARTS})

            source.run(tokens, Probe(len(tokens), positions, keep))
            return tensors

        self.once(f"sequence-{index}", compute)
        self._sequences.append(self._folder / f"sequence-{index}.safetensors")

    def attentions(self, layer: str) -> Iterator[Attention]:
        """The captured attention of a layer, one sequence after the other."""
        from safetensors import safe_open

        for path in self._sequences:
            with safe_open(path, framework="pt") as file:
                yield Attention(*(file.get_tensor(f"{layer}.{part}") for part in PARTS))
