"""Shows an observer the queries and keys of every full-attention layer of a transformers model, after QK-norm and RoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparsekv.basis.stats import Observer
from sparsekv.profiles.errors import SparsekvError

ATTENTION = "sparsekv_capture"


class TransformersCapture:
    """A local transformers model whose attention reports to an observer.

    It enters through transformers' attention registry, which hands over q and k exactly as the model's own attention
    gets them, so one path serves every architecture that transformers can run.
    """

    def __init__(self, model_dir: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.masking_utils import sdpa_mask

        if not (model_dir / "config.json").is_file():
            raise SparsekvError(f"no model at: {model_dir}", hint="give a folder that holds config.json and *.safetensors")
        AttentionInterface.register(ATTENTION, self._attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        self.config = model.config
        self._model = model.base_model.to(device).eval()  # without the vocabulary head: its logits are the largest tensor of all
        self._device = device
        self._observer: Observer | None = None

    @torch.inference_mode()
    def run(self, tokens: list[int], observer: Observer) -> None:
        """Reads one sequence of token ids."""
        self._observer = observer
        try:
            self._model(input_ids=torch.tensor([tokens], device=self._device), use_cache=False)
        finally:
            self._observer = None

    def _attention(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        """`query [1, Hq, T, D]`, `key` and `value` `[1, Hkv, T, D]`; the signature is transformers' own."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if self._observer is not None and getattr(module, "is_causal", True) and not getattr(module, "sliding_window", None):
            self._observer(str(module.layer_idx), query[0].transpose(0, 1), key[0].transpose(0, 1))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def weights_fingerprint(model_dir: Path) -> str:
    """sha256 over the norm weights of the model's safetensors files, as float32.

    Quantisers leave norms alone, so a checkpoint and its quantised copies share it; other weights do not.
    """
    import hashlib

    from safetensors import safe_open

    digest = hashlib.sha256()
    norms: dict[str, Path] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            norms |= {name: file for name in tensors.keys() if name.endswith("norm.weight") or name.endswith("layernorm.weight")}  # noqa: SIM118
    for name in sorted(norms):
        with safe_open(norms[name], framework="pt") as tensors:
            digest.update(name.encode())
            digest.update(tensors.get_tensor(name).float().numpy().tobytes())
    return digest.hexdigest() if norms else ""
