from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random Llama with 3 layers, 4 query heads and 2 KV heads of 16 dimensions."""

    def make(**changes: object) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        facts = {
            "vocab_size": 256,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "initializer_range": 0.3,  # attention that looks at something
        }
        folder = tmp_path_factory.mktemp("model")
        LlamaForCausalLM(LlamaConfig(**{**facts, **changes})).save_pretrained(folder)
        return folder

    return make


class ByteTokenizer:
    """Bytes as tokens: all that a corpus needs of a tokenizer."""

    bos_token_id = 1
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()
