"""The modules a DSpark head is made of. They know tensors and a config; no target model, no cache policy, no sampling.

Letters: B rows, T tokens, D draft hidden size, Hq and Hkv query and key/value heads, hd their size, r Markov rank,
V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class DSparkRMSNorm(nn.Module):
    """RMS norm over the last dimension, computed in float32 for half-precision inputs (``torch.rms_norm``)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class DSparkRotary(nn.Module):
    """Rotary tables at given positions.

    ``inv_freq`` is not saved; transformers v5 leaves such buffers uninitialised when it loads a model, so the model's
    ``_init_weights`` calls :meth:`compute` again.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        inv_freq, self.scaling = self.compute()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DSparkRotary:
        # `head.to(torch.bfloat16)` must not round the frequencies: far positions would be off by whole turns.
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = self.compute()[0].to(self.inv_freq.device)
        return self

    def compute(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [hd / 2] (float32), and the factor on cosine and sine that yarn asks for (else 1.0)."""
        rope = self.config.rope_parameters
        kind = rope.get("rope_type", "default")
        if kind not in ("default", "proportional"):
            return ROPE_INIT_FUNCTIONS[kind](self.config, None)
        exponent = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        inv_freq = 1.0 / (rope["rope_theta"] ** exponent)
        if kind == "proportional":  # Gemma 4: the slower pairs do not turn at all
            inv_freq[int(rope.get("partial_rotary_factor", 1.0) * self.config.head_dim // 2) :] = 0.0
            inv_freq = inv_freq / rope.get("factor", 1.0)
        return inv_freq, 1.0

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and *signed* sine, each [B, T, 1, hd], for positions [B, T]; see :func:`rotate`."""
        angles = positions.to(torch.float32)[..., None, None] * self.inv_freq.to(torch.float32)
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of x [B, T, H, hd]; equal to Llama's, in three operations because the sign sits in the sine."""
    cos, signed_sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


class DSparkAttention(nn.Module):
    """Attention of a block to [context; block]. Keys and values of both come from the same projections."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        size, bias = config.head_dim, config.attention_bias
        self.head_dim, self.kv_heads = size, config.num_key_value_heads
        gemma = config.layer_kind == "gemma4"
        self.scale: float | None = 1.0 if gemma else None
        self.value_eps: float | None = config.rms_norm_eps if gemma else None
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj: nn.Linear | None = None
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)
        self.q_norm = DSparkRMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = DSparkRMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def keys_values(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, each [B, T, Hkv, hd], of hidden states [B, T, D] (context or block)."""
        shape = (hidden.shape[0], hidden.shape[1], self.kv_heads, self.head_dim)
        keys = self.k_proj(hidden).view(shape)
        values = keys if self.v_proj is None else self.v_proj(hidden).view(shape)
        if self.value_eps is not None:
            values = F.rms_norm(values, (self.head_dim,), None, self.value_eps)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        return rotate(keys, rotary), values

    def queries(self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotated queries [B, T, Hq, hd] of hidden states [B, T, D]."""
        queries = self.q_proj(hidden).view(hidden.shape[0], hidden.shape[1], -1, self.head_dim)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        return rotate(queries, rotary)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Output [B, T, D] of queries [B, T, Hq, hd] over keys and values [B, Hkv, S, hd].

        Query heads that share a key head become further queries of it, so keys are never repeated in memory. ``mask``
        is boolean, true where a key may be seen: [B, 1, 1, S] for all queries, or [B or 1, 1, T, S]; ``None`` is all.
        """
        rows, length = queries.shape[:2]
        folded = queries.view(rows, length, self.kv_heads, self.groups, self.head_dim)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(rows, self.kv_heads, self.groups * length, self.head_dim)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, self.groups, 1)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self.scale)
        out = out.view(rows, self.kv_heads, self.groups, length, self.head_dim).permute(0, 3, 1, 2, 4)
        return self.o_proj(out.reshape(rows, length, -1))


class DSparkMLP(nn.Module):
    """Gated feed-forward of Llama: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


class DSparkLayer(nn.Module):
    """One draft layer: norms before attention and feed-forward (Llama, Qwen3), or before and after both, with one
    factor on the layer's output (Gemma 4). The caller runs the attention, because it owns the keys of the context.
    """

    layer_scalar: torch.Tensor

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.self_attn = DSparkAttention(config)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.sandwich = config.layer_kind == "gemma4"
        if self.sandwich:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [B, T, D] from its input and what its attention gave for the normed input."""
        if not self.sandwich:
            hidden = hidden + attended
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        hidden = hidden + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(inner)) * self.layer_scalar


class MarkovHead(nn.Module):
    """Low-rank dependency of a slot on the token drafted before it (DSpark paper, sequential stage).

    ``markov_w1`` [V, r] reads target ids, ``markov_w2`` [Vd, r] writes draft logits. With ``u = W1[x_{k-1}]``:

    - vanilla: bias ``W2 u``;
    - gated: ``W2 (sigmoid(Wg [h_k; u]) * u)``;
    - rnn: ``[gate; candidate; output] = Wj [s_{k-1}; u; h_k]``, ``s_k = sigmoid(gate) * s_{k-1} + (1 - sigmoid(gate)) *
      tanh(candidate)``, bias ``W2 tanh(output)``, ``s_0 = 0``.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def embed(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """``W1[x_{k-1}]`` [..., r] of target ids [...]."""
        return self.markov_w1(previous_ids)

    def latent(
        self, state: torch.Tensor | None, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The vector [..., r] that W2 reads, and the next state (``None`` but for rnn).

        Args:
            state: [..., r] or ``None`` at the first slot.
            embedded: ``W1[x_{k-1}]`` [..., r].
            hidden: h_k [..., D].
        """
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1))) * embedded, None
        if state is None:
            state = torch.zeros_like(embedded)
        gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
        return torch.tanh(output), torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))


class ConfidenceHead(nn.Module):
    """Logit of the probability that a drafted token survives, given that the ones before it did (paper, confidence)."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Logits [...] of hidden states [..., D] and, if it was built so, ``W1[x_{k-1}]`` [..., r]."""
        if self.with_markov:
            assert embedded is not None
            hidden = torch.cat((hidden, embedded), dim=-1)
        return self.proj(hidden).squeeze(-1)
