"""Calibration text: the bundled corpus or the user's own folder, as token sequences that fill the context."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from sparsekv.basis.transcripts import render, transcript
from sparsekv.profiles.errors import SparsekvError

Split = Literal["fit", "heldout"]

MAX_FILE_BYTES = 1 << 20
MAX_LINE = 2000
"""Minified bundles and data dumps say little about text."""
SKIPPED_FOLDERS = {"node_modules", "__pycache__", "venv", "build", "dist", "target"}


@dataclass(frozen=True)
class Document:
    kind: Literal["code", "prose"]
    name: str
    text: str


def bundled(split: Split) -> list[Document]:
    """The corpus that ships with the package, in a fixed order."""
    documents: list[Document] = []
    for kind in ("code", "prose"):
        folder = files("sparsekv.basis") / "calibration" / split / kind
        for file in sorted(folder.iterdir(), key=lambda item: item.name):
            documents.append(Document(kind, file.name.removesuffix(".txt"), file.read_text(encoding="utf-8")))  # type: ignore[arg-type]
    return documents


def from_folder(folder: Path, split: Split) -> list[Document]:
    """The user's own text: every readable UTF-8 file; one file in eight is held out, by its name.

    Raises:
        SparsekvError: no folder, or too few usable files for both splits.
    """
    if not folder.is_dir():
        raise SparsekvError(f"no folder at: {folder}", hint="`--corpus` takes a folder of text files")
    documents = list(_readable(folder))
    chosen = [d for d in documents if (hashlib.sha256(d.name.encode()).digest()[0] % 8 == 0) == (split == "heldout")]
    if not chosen:
        raise SparsekvError(
            f"{folder} holds {len(documents)} usable text files, too few to fit on some and test on others",
            hint="give a folder with at least some dozens of UTF-8 text files, or leave `--corpus` out",
        )
    return chosen


def _readable(folder: Path) -> Iterator[Document]:
    prose = {".md", ".rst", ".txt", ".adoc", ".html", ""}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(root, name)
            if name.startswith(".") or path.is_symlink() or not path.is_file() or not 0 < path.stat().st_size <= MAX_FILE_BYTES:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if "\0" not in text and max(map(len, text.splitlines()), default=0) <= MAX_LINE:
                yield Document("prose" if path.suffix in prose else "code", path.relative_to(folder).as_posix(), text)


def token_sequences(documents: Sequence[Document], tokenizer: Any, context: int, count: int, seed: int) -> list[list[int]]:
    """`count` sequences of exactly `context` tokens, each a shuffled mix of code, prose and transcripts about the code.

    Where the text is shorter than the context it comes again in another order and other pieces, as it does for an agent.
    """
    start = [tokenizer.bos_token_id] if getattr(tokenizer, "bos_token_id", None) is not None else []
    # Text is cut by lines into pieces of about 8 KB, so that a sequence mixes kinds and no file dominates one.
    pieces = [piece for document in documents for piece in _pieces(document.text, 8192)]
    code = [(document.name, document.text) for document in documents if document.kind == "code"]
    sequences = []
    for index in range(count):
        rng = random.Random(f"{seed}:{index}")
        tokens = list(start)
        while len(tokens) < context:
            text = render(transcript(code, rng), tokenizer) if code and rng.random() < 0.3 else rng.choice(pieces)
            tokens += tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"]
        sequences.append(tokens[:context])
    return sequences


def sequences_hash(sequences: Sequence[Sequence[int]]) -> str:
    """sha256 of the token ids: equal text under another tokenizer is another calibration."""
    digest = hashlib.sha256()
    for tokens in sequences:
        digest.update(struct.pack(f"<q{len(tokens)}i", len(tokens), *tokens))
    return digest.hexdigest()


def _pieces(text: str, size: int) -> Iterator[str]:
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= size:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)
