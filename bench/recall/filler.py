"""Text between the facts of a context: runs of lines out of real files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from sparsekv.basis.corpus import Split, bundled, from_folder


class Filler:
    """Endless pieces of a few lines, from the bundled corpus or from any folder of code."""

    def __init__(self, texts: list[str]) -> None:
        self._files = [lines for text in texts if (lines := text.splitlines(keepends=True))]
        if not self._files:
            raise ValueError("no text to fill contexts with")

    @classmethod
    def bundled(cls, split: Split = "heldout") -> Filler:
        return cls([document.text for document in bundled(split)])

    @classmethod
    def of_folder(cls, folder: Path) -> Filler:
        """Raises SparsekvError where the folder holds too little text."""
        return cls([document.text for split in ("fit", "heldout") for document in from_folder(folder, split)])  # type: ignore[arg-type]

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """Pieces of 2 to 8 whole lines."""
        while True:
            lines = rng.choice(self._files)
            start = rng.randrange(len(lines))
            piece = "".join(lines[start : start + rng.randint(2, 8)])
            yield piece if piece.endswith("\n") else piece + "\n"
