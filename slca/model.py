"""The policy: one decoder for the Qwen2, Qwen3 and Llama families.

Grouped-query attention, rotary positions (llama3 scaling included), RMSNorm, SwiGLU, tied or untied head. Parameter
names are those of Hugging Face checkpoints, so `weights.py` needs no renaming. Left out: sliding windows, dropout,
mixture of experts, and rope scalings other than llama3 and linear (refused by name).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from slca.products import attend, linear, score_bias

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


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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
        self.q_proj = Linear(c.hidden_size, self.heads * self.dim, bias=bias)
        self.k_proj = Linear(c.hidden_size, self.kv_heads * self.dim, bias=bias)
        self.v_proj = Linear(c.hidden_size, self.kv_heads * self.dim, bias=bias)
        self.o_proj = Linear(self.heads * self.dim, c.hidden_size, bias=bias and c.model_type != "qwen2")
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(self.dim, c.rms_norm_eps), RMSNorm(self.dim, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: Callable) -> Tensor:
        heads = *x.shape[:-1], -1, self.dim
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attention(rotate(q, *rope), rotate(k, *rope), v))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves layout. x [...,H,D]; cos, sin [...,1,D], the sign of the first half in sin."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    recompute = False  # keep the block's input alone and compute the rest again in the backward pass

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, h: Tensor, rope: tuple[Tensor, Tensor], attention: Callable) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            # in here, not around the block: FSDP has gathered its weights then, in both passes
            return checkpoint(self._layers, h, rope, attention, use_reentrant=False, preserve_rng_state=False)
        return self._layers(h, rope, attention)

    def _layers(self, h: Tensor, rope: tuple[Tensor, Tensor], attention: Callable) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), rope, attention)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nn.Module):
    """Embedding, blocks and last norm; a module of its own only for the names of the checkpoints."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


@dataclass
class RowBlock:
    """Rows of like length as attention takes them, padded to shape (R, N); their tokens are `tokens` of the line.

    place int64: where each of them stands in the block, flattened. owner int64 [R]: the prompt of each row. mask bool
    [R, N, P + N]: what a row's token sees of its prompt and of its row.
    """

    tokens: slice
    shape: tuple[int, int]
    place: Tensor
    owner: Tensor
    mask: Tensor


@dataclass
class Packed:
    """Tokens of groups in one line: all prompts, then all rows behind them, shortest first, then filling (id 0).

    ids, position int64 [tokens]. prompts (n, P): shape of the padded prompts; prompt_place int64: where each prompt
    token stands there, flattened.
    """

    ids: Tensor
    position: Tensor
    prompts: tuple[int, int]
    prompt_place: Tensor
    rows: list[RowBlock]
    reach: int  # positions in use


def place(x: Tensor, at: Tensor, shape: tuple[int, int]) -> Tensor:
    """x [tokens, ...] into a block [*shape, ...] of zeros, token i at flat index at[i]."""
    if len(at) == shape[0] * shape[1]:  # nothing is padded, and `at` counts up
        return x.reshape(*shape, *x.shape[1:])
    return x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, at, x).view(*shape, *x.shape[1:])


class _Take(torch.autograd.Function):
    """Rows of x at indices that are all different: the way back is a copy, not a sum."""

    @staticmethod
    def forward(ctx, x: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.shape = x.shape
        return x.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


class Policy(nn.Module):
    """policy(ids [B,T] int64) -> logits [B,T,V]. Rows are right-padded at will: attention is causal."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def head(self) -> Tensor:
        """Output matrix [V, hidden]; the embedding itself where they are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        return linear(self.hidden(ids), self.head)

    def run(self, f: Callable, *args):
        """f(policy, *args) as one forward pass: what reads the weights of a sharded policy goes through here."""
        return f(self, *args)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids int64 [B,T] -> final hidden states [B,T,hidden], each row a sequence from position 0."""
        b, t = ids.shape

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(*(x.transpose(1, 2) for x in (q, k, v)), None).transpose(1, 2).reshape(b, t, -1)

        cos, sin = self.rope_table(t)
        return self._run(ids, (cos[:t, None], sin[:t, None]), attention)

    def hidden_packed(self, p: Packed) -> Tensor:
        """Groups of sequences that share their prompts -> final hidden states [tokens, hidden], as `Packed` lays them.

        A prompt's tokens run once for all its rows, forwards and backwards.
        """
        a, c = len(p.prompt_place), self.config
        groups = c.num_attention_heads // c.num_key_value_heads
        biases = [score_bias(block.mask, groups, self._compute_dtype()) for block in p.rows]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            prompts = [place(x[:a], p.prompt_place, p.prompts).transpose(1, 2) for x in (q, k, v)]
            out = [_Take.apply(attend(*prompts, None).transpose(1, 2).flatten(0, 1), p.prompt_place)]
            for block, bias in zip(p.rows, biases, strict=True):
                q_own, *own = (place(x[block.tokens], block.place, block.shape).transpose(1, 2) for x in (q, k, v))
                keys, values = (torch.cat([shared.index_select(0, block.owner), x], 2)
                                for shared, x in zip(prompts[1:], own, strict=True))
                of_rows = attend(q_own, keys, values, bias).transpose(1, 2).flatten(0, 1)
                out.append(_Take.apply(of_rows, block.place))
            return F.pad(torch.cat(out).flatten(1), (0, 0, 0, len(p.ids) - sum(map(len, out))))

        cos, sin = self.rope_table(p.reach)
        return self._run(p.ids, (cos[p.position][:, None], sin[p.position][:, None]), attention)

    def _run(self, ids: Tensor, rope: tuple[Tensor, Tensor], attention: Callable) -> Tensor:
        h = F.embedding(ids, self.model.embed_tokens.weight)
        rope = tuple(x.to(self._compute_dtype()) for x in rope)
        for block in self.model.layers:
            h = block(h, rope, attention)
        return self.model.norm(h)

    def _compute_dtype(self) -> torch.dtype:
        device = self.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.head.dtype

    def rope_table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, float32 [>= length, head_dim], grown on demand."""
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != self.device:
            size = 1 << max(8, (length - 1).bit_length())
            angle = torch.outer(torch.arange(size, dtype=torch.float32), rope_frequencies(self.config))
            cos, sin = angle.cos(), angle.sin()
            self._rope = (torch.cat([cos, cos], -1).to(self.device), torch.cat([-sin, sin], -1).to(self.device))
        return self._rope


def checkpoint_blocks(policy: Policy, on: bool = True) -> None:
    """Activation checkpointing a block (Chen et al. 2016): less memory, a second forward pass, the same gradients."""
    for block in policy.model.layers:
        block.recompute = on


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
