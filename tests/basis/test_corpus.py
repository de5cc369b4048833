from __future__ import annotations

import random
from pathlib import Path

import pytest

from sparsekv.basis.corpus import bundled, from_folder, sequences_hash, token_sequences
from sparsekv.basis.transcripts import render, transcript
from sparsekv.profiles.errors import SparsekvError


def test_bundled_text_is_there_and_split() -> None:
    fit, heldout = bundled("fit"), bundled("heldout")
    assert {document.kind for document in fit} == {document.kind for document in heldout} == {"code", "prose"}
    assert not {document.text for document in fit} & {document.text for document in heldout}
    assert sum(len(document.text) for document in fit) > 400_000


def test_sequences_are_exact_deterministic_and_different(tokenizer) -> None:
    documents = bundled("fit")
    first = token_sequences(documents, tokenizer, 5001, 3, seed=0)
    assert [len(tokens) for tokens in first] == [5001] * 3
    assert all(tokens[0] == tokenizer.bos_token_id for tokens in first)
    assert first == token_sequences(documents, tokenizer, 5001, 3, seed=0)
    assert len({sequences_hash([tokens]) for tokens in first}) == 3
    assert sequences_hash(first) != sequences_hash(token_sequences(documents, tokenizer, 5001, 3, seed=1))
    assert sequences_hash([[1, 2], [3]]) != sequences_hash([[1], [2, 3]])


def test_a_context_longer_than_the_text_is_filled(tokenizer) -> None:
    documents = [document for document in bundled("heldout") if document.kind == "prose"][:1]
    total = len(documents[0].text.encode())
    assert len(token_sequences(documents, tokenizer, 3 * total, 1, seed=0)[0]) == 3 * total


def test_a_folder_with_odd_files(tmp_path: Path, tokenizer) -> None:
    for index in range(24):
        (tmp_path / f"module_{index}.py").write_text(f"def function_{index}():\n    return {index}\n" * 20)
    usable = 24
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x01\xff")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "bundle.min.js").write_text("x" * 5000)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "big.txt").write_text("line\n" * 300_000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    (tmp_path / "link.py").symlink_to("/etc/hostname")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "readme.md").write_text("# Title\n\nText.\n")
    fit, heldout = from_folder(tmp_path, "fit"), from_folder(tmp_path, "heldout")
    names = [document.name for document in fit + heldout]
    assert len(names) == len(set(names)) == usable + 1
    assert heldout
    assert not any(word in " ".join(names) for word in ("png", "latin", "nul", "bundle", "big", ".git", "link", "loop"))
    assert len(token_sequences(fit, tokenizer, 1000, 1, seed=0)[0]) == 1000


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SparsekvError, match="no folder at"):
        from_folder(tmp_path / "absent", "fit")
    with pytest.raises(SparsekvError, match="0 usable text files"):
        from_folder(tmp_path, "fit")


class Template:
    chat_template = "x"

    def __init__(self, refused: set[str]) -> None:
        self.refused = refused

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        if any(message["role"] in self.refused for message in messages):
            raise ValueError("roles must alternate")
        return "|".join(message["role"] for message in messages)


def test_transcripts_follow_the_chat_template_as_far_as_it_goes() -> None:
    code = [(document.name, document.text) for document in bundled("fit") if document.kind == "code"]
    messages = transcript(code, random.Random(3))
    assert messages == transcript(code, random.Random(3))
    assert {message["role"] for message in messages} == {"system", "user", "assistant", "tool"}
    assert "tool" in render(messages, Template(set()))
    assert "tool" not in render(messages, Template({"tool"}))
    assert "TOOL: " in render(messages, Template({"system"}))
    assert "TOOL: " in render(messages, object())
