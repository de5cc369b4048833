"""The recall model in plain PyTorch: Qwen3.5's text architecture with one multi-token-prediction layer, for training.

Parameters carry the names of Qwen3.5 checkpoints, so the state dict is what transformers (`Qwen3_5ForCausalLM`) and vLLM
(`qwen3_5.py`, `qwen3_5_mtp.py`) load; `tests/bench/test_recall_model.py` compares this forward with transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

GatedDeltaRule = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class ModelShape:
    """About 11.7M parameters as it stands; three linear-attention layers to each full one."""

    vocab_size: int = 1024
    hidden: int = 256
    layers: int = 12
    intermediate: int = 448
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    rotary_dims: int = 32
    rope_theta: float = 1e7
    linear_k_heads: int = 2
    linear_v_heads: int = 4
    linear_head_dim: int = 128
    conv_kernel: int = 4
    eps: float = 1e-6
    max_positions: int = 65536

    def is_full(self, layer: int) -> bool:
        return layer % 4 == 3

    def config(self) -> dict[str, object]:
        """The checkpoint's `config.json`."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attn_output_gate": True,
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dims / self.head_dim,
            },
            "partial_rotary_factor": self.rotary_dims / self.head_dim,
            "linear_num_key_heads": self.linear_k_heads,
            "linear_num_value_heads": self.linear_v_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_conv_kernel_dim": self.conv_kernel,
            "layer_types": ["full_attention" if self.is_full(i) else "linear_attention" for i in range(self.layers)],
            "full_attention_interval": 4,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, chunk: int = 64
) -> torch.Tensor:
    """Plain chunked gated delta rule (arXiv 2412.06464), for the CPU and as the truth that a fast kernel is checked against.

    `query`, `key` `[B, T, H, D]` (normalised here), `value` `[B, T, H, D]`, `decay` (log) and `beta` `[B, T, H]` -> `[B, T, H, D]`.
    """
    dtype, length, dim = value.dtype, query.shape[1], query.shape[-1]
    query, key = (F.normalize(x.float(), dim=-1, eps=1e-6) for x in (query, key))
    pad = -length % chunk

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, H, N, chunk, ...]
        x = F.pad(x.float().transpose(1, 2), (0, 0) * (x.ndim - 3) + (0, pad))
        return x.unflatten(2, (-1, chunk))

    q, k, v, b, g = chunks(query) * dim**-0.5, chunks(key), chunks(value), chunks(beta), chunks(decay).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    between = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    system = (k * b.unsqueeze(-1)) @ k.mT * between
    right = torch.cat((v * b.unsqueeze(-1), k * (b * g.exp()).unsqueeze(-1)), dim=-1)
    new, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(dim, dim=-1)
    within = q @ k.mT * between
    state = torch.zeros(*q.shape[:2], dim, dim, device=q.device)
    out = []
    for i in range(q.shape[2]):
        fresh = new[:, :, i] - read[:, :, i] @ state
        out.append((q[:, :, i] * g[:, :, i].exp().unsqueeze(-1)) @ state + within[:, :, i] @ fresh)
        last = g[:, :, i, -1:, None]
        state = state * last.exp() + (k[:, :, i] * (last - g[:, :, i].unsqueeze(-1)).exp()).mT @ fresh
    return torch.stack(out, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype)


class RMSNorm(nn.Module):
    """Scale 1 + weight, as Gemma and Qwen3.5 have it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * F.silu(gate.float())).to(gate.dtype)


def linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class Convolution(nn.Module):
    """Depthwise causal convolution over `[B, T, C]`, as shifted sums: they fuse, a grouped convolution does not."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel, length = self.weight.shape[-1], x.shape[1]
        padded, weight = F.pad(x, (0, 0, kernel - 1, 0)), self.weight.to(x.dtype)
        total = padded[:, :length] * weight[:, 0, 0]
        for i in range(1, kernel):
            total = total + padded[:, i : i + length] * weight[:, 0, i]
        return total


class DeltaNet(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        keys, values = shape.linear_k_heads * shape.linear_head_dim, shape.linear_v_heads * shape.linear_head_dim
        self.sizes = (keys, keys, values)
        self.in_proj_qkv = linear(shape.hidden, sum(self.sizes))
        self.in_proj_z = linear(shape.hidden, values)
        self.in_proj_b = linear(shape.hidden, shape.linear_v_heads)
        self.in_proj_a = linear(shape.hidden, shape.linear_v_heads)
        self.conv1d = Convolution(sum(self.sizes), shape.conv_kernel)
        self.dt_bias = nn.Parameter(torch.empty(shape.linear_v_heads))
        self.A_log = nn.Parameter(torch.empty(shape.linear_v_heads))
        self.norm = GatedNorm(shape.linear_head_dim, shape.eps)
        self.out_proj = linear(values, shape.hidden)

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = self.shape
        q, k, v = F.silu(self.conv1d(self.in_proj_qkv(x))).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, shape.linear_head_dim)) for part in (q, k, v))
        repeat = shape.linear_v_heads // shape.linear_k_heads
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return q.repeat_interleave(repeat, dim=2), k.repeat_interleave(repeat, dim=2), v.contiguous(), decay, self.in_proj_b(x).sigmoid()

    def after(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.shape.linear_head_dim))
        return self.out_proj(self.norm(out, gate).flatten(-2))


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(shape.hidden, shape.q_heads * shape.head_dim * 2)  # per head: query, then output gate
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.q_heads * shape.head_dim, shape.hidden)
        self.q_norm, self.k_norm = RMSNorm(shape.head_dim, shape.eps), RMSNorm(shape.head_dim, shape.eps)

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dim = self.shape.head_dim
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * dim)).chunk(2, dim=-1)
        key, value = (project(x).unflatten(-1, (-1, dim)) for project in (self.k_proj, self.v_proj))
        query, key = self._rotate(self.q_norm(query), cos, sin), self._rotate(self.k_norm(key), cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), gate.flatten(-2)

    def after(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x.split((self.shape.rotary_dims, x.shape[-1] - self.shape.rotary_dims), dim=-1)
        first, second = turned.float().chunk(2, dim=-1)
        return torch.cat(((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest), dim=-1)


class MLP(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(shape.hidden, shape.intermediate), linear(shape.hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Split so that everything but the two attention ops can be compiled."""

    def __init__(self, shape: ModelShape, full: bool) -> None:
        super().__init__()
        self.full = full
        if full:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = DeltaNet(shape)
        self.mlp = MLP(shape)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps), RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, delta_rule: GatedDeltaRule) -> torch.Tensor:
        if self.full:
            query, key, value, gate = self.attention_in(x, cos, sin)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return self.attention_out(x, out, gate)
        return self.delta_out(x, delta_rule(*self.delta_in(x)))

    def attention_in(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.self_attn.before(self.input_layernorm(x), cos, sin)

    def attention_out(self, x: torch.Tensor, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self._feed_forward(x + self.self_attn.after(out, gate))

    def delta_in(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear_attn.before(self.input_layernorm(x))

    def delta_out(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._feed_forward(x + self.linear_attn.after(self.input_layernorm(x), out))

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, shape.is_full(i)) for i in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class NextPredictor(nn.Module):
    """The MTP module: from the hidden state at t and token t + 1, the hidden state that predicts token t + 2."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.fc = linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, full=True)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = RMSNorm(shape.hidden, shape.eps), RMSNorm(shape.hidden, shape.eps)


class RecallModel(nn.Module):
    def __init__(self, shape: ModelShape, delta_rule: GatedDeltaRule = gated_delta_rule) -> None:
        super().__init__()
        self.shape, self.delta_rule = shape, delta_rule
        self.model, self.mtp = Trunk(shape), NextPredictor(shape)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        torch.manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                continue
            if "conv1d" in name:
                nn.init.uniform_(parameter, -0.5, 0.5)
            elif parameter.ndim == 2:
                scale = (2 * self.shape.layers) ** -0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5 if "embed" not in name else 0.02)
        for module in self.modules():
            if isinstance(module, DeltaNet):
                # Memories from a few tokens to some thousands, log-uniform.
                step = torch.empty_like(module.dt_bias).uniform_(-7.0, -1.5).exp()
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1.0, 4.0).log())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states `[B, T, hidden]` after the final norm, for `tokens [B, T]`."""
        cos, sin = self._rope(tokens.shape[1], tokens.device)
        x = self._embed(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, self.delta_rule)
        return self.model.norm(x)

    def predict_next(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """One MTP step: `hidden [B, T, hidden]` at t and `following [B, T]`, the tokens at t + 1."""
        mtp = self.mtp
        joined = torch.cat((mtp.pre_fc_norm_embedding(self._embed(following)), mtp.pre_fc_norm_hidden(hidden)), dim=-1)
        cos, sin = self._rope(hidden.shape[1], hidden.device)
        return mtp.norm(mtp.layers[0](mtp.fc(joined), cos, sin, self.delta_rule))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.model.embed_tokens(tokens)
        return rows.to(torch.get_autocast_dtype(rows.device.type)) if torch.is_autocast_enabled(rows.device.type) else rows

    def _rope(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        dims = self.shape.rotary_dims
        frequencies = self.shape.rope_theta ** -(torch.arange(0, dims, 2, device=device).float() / dims)
        angles = torch.arange(length, device=device).float()[:, None] * frequencies
        return angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, dims / 2]: the same for every head
