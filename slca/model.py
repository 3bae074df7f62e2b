"""The policy: one decoder for the Qwen2, Qwen3 and Llama families, with a static KV cache.

Grouped-query attention, rotary positions (llama3 scaling included), RMSNorm, SwiGLU, tied or untied head. Parameter
names are those of Hugging Face checkpoints, so `weights.py` needs no renaming. Left out: sliding windows, dropout,
mixture of experts, and rope scalings other than llama3 and linear (refused by name).
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_KEYS = {"default": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass
class ModelConfig:
    """Shape of a decoder; field names follow Hugging Face's `config.json`."""

    model_type: str = "qwen2"
    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int | None = None  # hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    attention_bias: bool | None = None  # q, k, v bias; the family decides: Qwen2 has it, the others do not

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if not (isinstance(value, int) and not isinstance(value, bool) and value > 0
                    or name == "head_dim" and value is None):
                raise ValueError(f"{name} must be a whole number above 0, found {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number above 0, found {value!r}")
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type {self.model_type!r} is not supported (one of {', '.join(FAMILIES)})")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of "
                                 f"num_attention_heads {self.num_attention_heads} and head_dim is not given")
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                             f"num_key_value_heads {self.num_key_value_heads}")
        if self.attention_bias is None:
            self.attention_bias = self.model_type == "qwen2"
        if not isinstance(self.rope_scaling, dict | None):
            raise ValueError(f"rope_scaling must be an object, found {self.rope_scaling!r}")
        kind = rope_kind(self.rope_scaling)
        if kind not in ROPE_KEYS:
            raise ValueError(f"rope_scaling type {kind!r} is not supported (one of {', '.join(ROPE_KEYS)})")
        missing = [k for k in ROPE_KEYS[kind] if not isinstance((self.rope_scaling or {}).get(k), int | float)]
        if missing:
            raise ValueError(f"rope_scaling of type {kind} needs numbers for {', '.join(missing)}")

    @classmethod
    def from_hf(cls, raw: dict) -> ModelConfig:
        """Read a `config.json`, in the layout before (`rope_theta`) or after (`rope_parameters`) transformers 5."""
        rope = raw.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters must be an object, found {rope!r}")
        if raw.get("use_sliding_window") or raw.get("mlp_bias"):
            raise ValueError("use_sliding_window and mlp_bias are not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported (silu only)")
        scaling = raw.get("rope_scaling") or (rope if rope_kind(rope) != "default" else None)
        known = {k: raw[k] for k in cls.__dataclass_fields__ if raw.get(k) is not None}
        bases = (raw.get("rope_theta"), rope.get("rope_theta"), 10000.0)
        known["rope_theta"] = next(base for base in bases if base is not None)
        known["rope_scaling"] = scaling
        known.setdefault("tie_word_embeddings", False)  # the default of these three families' configurations
        known.setdefault("num_key_value_heads", known.get("num_attention_heads", 4))
        if "model_type" not in known:
            raise ValueError("config.json has no model_type")
        if known["model_type"] == "qwen2":
            known["attention_bias"] = True
        return cls(**known)

    def to_hf(self) -> dict:
        """The `config.json` that other tools read."""
        raw = {"architectures": [FAMILIES.get(self.model_type)], "hidden_act": "silu", "torch_dtype": "float32"}
        return raw | {k: getattr(self, k) for k in self.__dataclass_fields__}


def rope_kind(scaling: dict | None) -> str:
    scaling = scaling or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Inverse wavelengths [head_dim / 2], float32; llama3 stretches the long ones (Llama 3.1 release)."""
    dim = config.head_dim
    inv = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    s = config.rope_scaling or {}
    if rope_kind(s) == "linear":
        return inv / s["factor"]
    if rope_kind(s) == "llama3":
        low, high, old = s["low_freq_factor"], s["high_freq_factor"], s["original_max_position_embeddings"]
        turns = old * inv / (2 * math.pi)  # how often a wave fits into the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * inv / s["factor"] + blend * inv
    return inv


class KVCache:
    """Keys and values of every layer, allocated once: [layers, rows, kv_heads, max_len, head_dim].

    `length[r]` is the cursor of row r: how many tokens it holds. Rows need no padding: each writes at its own cursor
    and sees only its own columns below it. Columns at or past the cursor hold leftovers and are never read.
    """

    def __init__(self, config: ModelConfig, rows: int, max_len: int, dtype=torch.float32, device="cpu"):
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, max_len, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` become copies of rows `source` (int64 [n] each), cursors included."""
        self.length[target] = self.length[source]
        top = int(self.length[target].max()) if len(target) else 0
        for t in (self.k, self.v):
            t[:, target, :, :top] = t[:, source, :, :top]


@dataclass
class _Step:
    """What all layers of one cached forward share: where to write and what to see."""

    cache: KVCache
    rows: Tensor | int  # int n: the first n rows, as views; Tensor: any rows, gathered
    where: tuple[Tensor, Tensor, Tensor]  # (cache row, position, flat index) of every token written, [tokens] each
    span: int  # columns any row sees
    mask: Tensor | None  # bool [B, N, span], True is seen; None: a fresh causal block


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [B,H,N,D], k and v [B,K,S,D] -> [B,H,N,D]. mask bool [B,N,S], or None for a causal block (N == S)."""
    b, h, n, d = q.shape
    groups = h // k.shape[1]
    if mask is not None:  # the query heads of one key head stand in the query axis: keys are not repeated
        q = q.reshape(b, k.shape[1], groups * n, d)
        mask = mask[:, None].repeat(1, 1, groups, 1) if n > 1 else mask[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(b, h, n, d)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":  # several times faster than the fused kernel backwards
        with torch.autocast("cpu", enabled=False):
            future = torch.full((n, n), float("-inf"), dtype=q.dtype).triu(1)
            return torch.matmul(torch.softmax(torch.matmul(q * d ** -0.5, k.transpose(-1, -2)) + future, -1), v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        bias = c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=bias and c.model_type != "qwen2")
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(self.dim, c.rms_norm_eps), RMSNorm(self.dim, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, step: _Step | None) -> Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.heads, self.dim)
        k = self.k_proj(x).view(b, n, self.kv_heads, self.dim)
        v = self.v_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2)  # [B,K,N,D]
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope).transpose(1, 2), rotate(k, *rope).transpose(1, 2)  # [B,H,N,D], [B,K,N,D]
        mask = None
        if step is not None:
            ck, cv, mask = step.cache.k[layer], step.cache.v[layer], step.mask
            row, position, flat = step.where
            ck[row, :, position] = k.transpose(1, 2).reshape(b * n, self.kv_heads, self.dim)[flat].to(ck.dtype)
            cv[row, :, position] = v.transpose(1, 2).reshape(b * n, self.kv_heads, self.dim)[flat].to(cv.dtype)
            if mask is not None:
                pick = slice(0, step.rows) if isinstance(step.rows, int) else step.rows
                k, v = ck[pick, :, :step.span].to(q.dtype), cv[pick, :, :step.span].to(q.dtype)
        out = attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, self.heads * self.dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves layout. x [B,N,H,D]; cos, sin [B or 1,N,1,D], the sign of the first half in sin."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, h: Tensor, rope: tuple[Tensor, Tensor], layer: int, step: _Step | None) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), rope, layer, step)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nn.Module):
    """Embedding, blocks and last norm; a module of its own only for the names of the checkpoints."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Policy(nn.Module):
    """policy(ids [B,T] int64) -> logits [B,T,V]. Rows are right-padded at will: attention is causal."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def head(self) -> Tensor:
        """Output matrix [V, hidden]; the embedding itself where they are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.head)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids int64 [B,T] -> final hidden states [B,T,hidden], each row a sequence from position 0."""
        cos, sin = self._rope_table(ids.shape[1])
        rope = cos[None, :ids.shape[1], None], sin[None, :ids.shape[1], None]
        return self._run(ids, rope, None)

    def extend(self, ids: Tensor, cache: KVCache, rows: Tensor | int, count: Tensor | None = None) -> Tensor:
        """Feed ids int64 [B,N] to cache rows at their cursors and move the cursors on -> hidden [B,N,hidden].

        rows: int64 [B], or an int for the first B rows (the fast way to decode). count int64 [B]: how many of the N
        tokens of a row are real (right padding beyond; their outputs mean nothing). All rows at cursor 0: a plain
        causal block. Raises ValueError where a row would outgrow the cache.
        """
        b, n = ids.shape
        index = torch.arange(rows, device=ids.device) if isinstance(rows, int) else rows
        start = cache.length[index]
        count = torch.full_like(start, n) if count is None else count
        end = start + count
        span = int(end.max())
        if span > cache.k.shape[3]:
            raise ValueError(f"the KV cache holds {cache.k.shape[3]} tokens a row, {span} are needed")
        offset = torch.arange(n, device=ids.device)
        position = start[:, None] + offset  # [B,N]
        real = offset < count[:, None]
        flat = real.flatten().nonzero().squeeze(1)
        where = index[:, None].expand(b, n).flatten()[flat], position.flatten()[flat], flat
        mask = None
        if bool(start.any()) or n == 1:
            mask = torch.arange(span, device=ids.device) <= position[:, :, None]  # [B,N,span]
        cos, sin = self._rope_table(span + n)
        out = self._run(ids, (cos[position][:, :, None], sin[position][:, :, None]),
                        _Step(cache, rows, where, span, mask))
        cache.length[index] = end
        return out

    def _run(self, ids: Tensor, rope: tuple[Tensor, Tensor], step: _Step | None) -> Tensor:
        h = F.embedding(ids, self.model.embed_tokens.weight)
        dtype = torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else h.dtype
        rope = rope[0].to(dtype), rope[1].to(dtype)
        for layer, block in enumerate(self.model.layers):
            h = block(h, rope, layer, step)
        return self.model.norm(h)

    def _rope_table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, float32 [>= length, head_dim], grown on demand."""
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != self.device:
            size = 1 << max(8, (length - 1).bit_length())
            angle = torch.outer(torch.arange(size, dtype=torch.float32), rope_frequencies(self.config))
            cos, sin = angle.cos(), angle.sin()
            self._rope = (torch.cat([cos, cos], -1).to(self.device), torch.cat([-sin, sin], -1).to(self.device))
        return self._rope


def new_policy(config: ModelConfig, seed: int = 0) -> Policy:
    """A freshly drawn policy: embeddings N(0, .08), matrices N(0, 1/fan_in), a block's outputs a tenth of it.

    Blocks that start quiet leave the tokens themselves in the residual stream: copying is then learnt much sooner than
    with embeddings of .02 under blocks at full size.
    """
    policy, draw = Policy(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim == 2:
                std = 0.08 if "embed" in name or "lm_head" in name else p.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= 0.1
                p.normal_(0, std, generator=draw)
    return policy
