"""The policy as the sampler runs it: packed weights, a KV cache with shared prompts, one token a row and step.

The same function as `Policy.hidden`, laid out for decoding: q, k, v and gate, up are one product each, the weights lie
as the machine's kernels want them (bfloat16 if asked), and the prompt of a group stands once in the cache, where all
its rows read it. Nothing here waits for the device, so a step can be captured as a CUDA graph. Left out: gradients.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slca.lora import whole_weight
from slca.model import ModelConfig, Policy
from slca.products import attend, onednn, onednn_runs, score_bias

HIDDEN = -1e30  # added to the score of a column that is not to be seen; finite, so a row that sees none has no NaN
FEW_ROWS = 4  # below this, MKL's float32 products beat oneDNN's


class Matrix:
    """A matrix [out, in] and its bias, as this machine multiplies by it fastest: matrix(x [..., in]) -> [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias, self.plain, self.packed = bias, weight, None
        if onednn_runs(weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
            if weight.dtype == torch.bfloat16:
                self.plain = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None or self.plain is not None and x.shape[0] < FEW_ROWS:
            return F.linear(x, self.plain, self.bias)
        return onednn(x, self.packed, self.bias)


@dataclass
class _Layer:
    qkv: Matrix
    head_norm: Tensor | None  # [heads + kv_heads, head_dim], Qwen3
    out: Matrix
    gate_up: Matrix
    down: Matrix


class Cache:
    """Keys and values, kv[layer, 0 or 1, slot, kv_head, column, head_dim]; grows on demand.

    It begins as zeros and only ever holds numbers: columns past a slot's length are leftovers that a mask hides.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.kv = torch.zeros(config.num_hidden_layers, 2, 0, config.num_key_value_heads, 0, config.head_dim,
                              dtype=dtype, device=device)
        self._views: tuple[tuple, list] = ((), [])

    def reserve(self, slots: int, columns: int, limit: int) -> bool:
        """Room for so many; columns grow by half at a time, to `limit` at most. -> whether the memory moved."""
        _, _, s, _, c, _ = self.kv.shape
        if slots <= s and columns <= c:
            return False
        old, shape = self.kv, list(self.kv.shape)
        shape[2] = max(slots, s)
        shape[4] = c if columns <= c else max(columns, min(c * 3 // 2, limit))
        self.kv = torch.zeros(shape, dtype=old.dtype, device=old.device)
        self.kv[:, :, :s, :, :c] = old
        self._views = ((), [])
        return True

    def views(self, slots: int, columns: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of every layer: its memory as one line of vectors, and the first slots' keys (transposed) and values."""
        if self._views[0] != (slots, columns):
            self._views = (slots, columns), [
                (kv.view(-1, kv.shape[-1]), kv[0, :slots, :, :columns].transpose(-1, -2), kv[1, :slots, :, :columns])
                for kv in self.kv]
        return self._views[1]

    def copy(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Slots `target` become copies of slots `source`, int64 [n] each."""
        self.kv[:, :, target, :, :columns] = self.kv[:, :, source, :, :columns]


@dataclass
class Shared:
    """Which prompts the rows of a step share. The prompts stand in the first slots of their cache.

    grid int64 [prompts * members]: row at each place (any row where a prompt has fewer members); back int64 [B]: the
    place of each row. length int64 [prompts]: tokens of each, of `columns` at most.
    """

    prompts: int
    members: int
    columns: int
    length: Tensor
    grid: Tensor
    back: Tensor


class Engine:
    """The weights of a policy in `dtype` (None: its own), for `reach` positions and the first `vocabulary` ids."""

    def __init__(self, policy: Policy, reach: int, dtype: torch.dtype | None = None, vocabulary: int | None = None):
        self.policy, self.config = policy, policy.config
        self.dtype, self.device = dtype or policy.head.dtype, policy.device
        self.vocabulary = vocabulary or policy.config.vocab_size
        self._numbers = torch.arange(2 * max(reach, 1024), device=self.device)
        self.cos, self.sin = policy.rope_table(reach)
        c = self.config
        scale = [c.head_dim ** -0.5] * c.num_attention_heads + [1.0] * c.num_key_value_heads
        self.scale = torch.tensor(scale, device=self.device)[:, None]  # folds the scores' scale into q's rotation
        self._held: dict[str, Tensor] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the policy's weights as they are now, adapters merged. On a GPU they stay where they were, as captured
        graphs need."""
        c, policy, names = self.config, self.policy, {name for name, _ in self.policy.named_parameters()}

        def kept(name: str, new: Tensor) -> Tensor:
            if self.device.type == "cpu":
                return new
            old = self._held.setdefault(name, new)
            return old if old is new else old.copy_(new)

        def stacked(*parts: str, norm: str | None = None) -> Tensor | None:
            """These tensors as one, times the weight of the norm in front of them."""
            if parts[0] not in names:
                return None
            scale = whole_weight(policy, norm) if norm else None
            found = (whole_weight(policy, n) if scale is None else whole_weight(policy, n) * scale for n in parts)
            return kept(parts[0], torch.cat([part.to(self.dtype) for part in found]))

        def matrix(*parts: str, norm: str | None = None) -> Matrix:
            return Matrix(stacked(*parts, norm=norm), stacked(*[n.replace("weight", "bias") for n in parts]))

        self.layers = []
        for at in (f"model.layers.{i}." for i in range(c.num_hidden_layers)):
            q, k = (stacked(f"{at}self_attn.{x}_norm.weight") for x in "qk")
            head_norm = None if q is None else kept(at + "head_norm", torch.cat([
                q.expand(c.num_attention_heads, -1), k.expand(c.num_key_value_heads, -1)]))
            self.layers.append(_Layer(
                matrix(*[f"{at}self_attn.{x}_proj.weight" for x in "qkv"], norm=at + "input_layernorm.weight"),
                head_norm, matrix(at + "self_attn.o_proj.weight"),
                matrix(*[f"{at}mlp.{x}_proj.weight" for x in ("gate", "up")],
                       norm=at + "post_attention_layernorm.weight"),
                matrix(at + "mlp.down_proj.weight")))
        self.embed, self.norm = stacked("model.embed_tokens.weight"), stacked("model.norm.weight")
        head = self.embed if c.tie_word_embeddings else stacked("lm_head.weight")
        self.head = Matrix(head[:self.vocabulary])

    def drop(self) -> None:
        """Give the weights' memory back, until `refresh`."""
        self.layers, self.embed, self.norm, self.head, self._held = [], None, None, None, {}

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        return self.head(hidden)

    def prefill(self, ids: Tensor, cache: Cache, slots: Tensor) -> Tensor:
        """ids int64 [B,N], from position 0, into slots int64 [B] -> hidden [B,N,hidden]. Right padding does no harm."""
        b, n = ids.shape

        def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            q, k, v = (x.reshape(b, n, -1, x.shape[-1]).transpose(1, 2) for x in (q, *kv.chunk(2, 1)))
            cached = cache.kv[layer]
            cached[0][slots, :, :n], cached[1][slots, :, :n] = k, v
            return attend(q, k, v, None).transpose(1, 2).reshape(b * n, -1)

        position = torch.arange(n, device=ids.device).repeat(b)
        return self._run(ids.flatten(), position, False, attention).view(b, n, -1)

    def extend(self, ids: Tensor, cache: Cache, slots: Tensor, length: Tensor, span: int, start: Tensor,
               prompts: Cache, prompt_slots: Tensor, prompt_columns: int) -> Tensor:
        """ids int64 [B,N] behind what the slots hold -> hidden [B,N,hidden]. Right padding is harmless: what would lie
        past the end of the cache goes to its last column, which no row may use.

        length, start int64 [B]: tokens in a row's own slot and in its shared prompt (0: none); span: columns of the
        cache from now on, of any row; prompt_columns: those of any row's prompt.
        """
        b, n = ids.shape
        column = (length[:, None] + torch.arange(n, device=ids.device)).clamp_(max=cache.kv.shape[4] - 1)  # [B,N]
        seen = self.numbers(span) <= column[:, :, None]
        if prompt_columns:
            shared = self.numbers(prompt_columns) < start[:, None, None]
            seen = torch.cat([shared.expand(b, n, -1), seen], -1)
        bias = score_bias(seen, self.config.num_attention_heads // self.config.num_key_value_heads, self.dtype)

        heads = torch.arange(self.config.num_key_value_heads, device=ids.device)
        at = slots[:, None, None], heads[:, None], column[:, None]  # [B,1,1], [K,1], [B,1,N]

        def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            q, k, v = (x.reshape(b, n, -1, x.shape[-1]).transpose(1, 2) for x in (q, *kv.chunk(2, 1)))
            cached = cache.kv[layer]
            cached[0][at], cached[1][at] = k, v
            seen_kv = cached[:, slots, :, :span]
            if prompt_columns:
                seen_kv = torch.cat([prompts.kv[layer][:, prompt_slots, :, :prompt_columns], seen_kv], 3)
            return attend(q, *seen_kv, bias).transpose(1, 2).reshape(b * n, -1)

        position = (start[:, None] + column).flatten()
        return self._run(ids.flatten(), position, False, attention).view(b, n, -1)

    def step(self, ids: Tensor, cache: Cache, length: Tensor, span: int, start: Tensor, prompts: Cache,
             shared: Shared | None) -> Tensor:
        """A token for each of the first B slots: ids, length, start int64 [B] as in `extend` -> hidden [B,hidden]."""
        c, b, kv_heads = self.config, len(ids), self.config.num_key_value_heads
        groups = c.num_attention_heads // kv_heads
        _, _, slots, _, columns, _ = cache.kv.shape
        # where the keys of a token go, and then its values, in a layer's cache as one line of vectors
        at = self.numbers(b)[:, None] * (kv_heads * columns) + self.numbers(kv_heads) * columns + length[:, None]
        at = torch.cat([at, at + slots * kv_heads * columns], 1).flatten()
        bias = self._bias(length + 1, span)
        own = cache.views(b, span)
        if shared is not None:
            theirs = prompts.views(shared.prompts, shared.columns)
            theirs_bias = self._bias(shared.length, shared.columns)

        def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            line, keys, values = own[layer]
            line.index_copy_(0, at, kv.reshape(-1, c.head_dim))
            q = q.reshape(b, kv_heads, groups, c.head_dim)  # the query heads of a key head: keys are not repeated
            if shared is None:
                return torch.matmul(torch.softmax(torch.matmul(q, keys).add_(bias), -1), values).view(b, -1)
            mine = partial(q, keys, values, bias)
            _, keys, values = theirs[layer]
            q = q.index_select(0, shared.grid).view(shared.prompts, shared.members, kv_heads, groups, c.head_dim)
            q = q.transpose(1, 2).reshape(shared.prompts, kv_heads, shared.members * groups, c.head_dim)
            of_prompt = [x.view(shared.prompts, kv_heads, shared.members, groups, -1).transpose(1, 2).reshape(
                shared.prompts * shared.members, kv_heads, groups, -1).index_select(0, shared.back[:b])
                for x in partial(q, keys, values, theirs_bias)]
            return merged(mine, of_prompt).view(b, -1)

        return self._run(ids, start + length, True, attention)

    def _run(self, ids: Tensor, position: Tensor, scaled: bool, attention: Callable) -> Tensor:
        """ids, position int64 [tokens] -> final hidden [tokens, hidden].

        attention(layer, q [tokens, heads, head_dim], keys and values [tokens, 2 kv_heads, head_dim]): q and keys are
        rotated, q times the scores' scale if `scaled`.
        """
        c = self.config
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        if scaled:
            cos, sin = cos * self.scale, sin * self.scale
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        heads, half = c.num_attention_heads, c.head_dim // 2
        h = F.embedding(ids, self.embed)
        for i, w in enumerate(self.layers):
            x = w.qkv(self._normal(h)).view(len(ids), -1, c.head_dim)
            qk = x[:, :heads + c.num_key_value_heads]
            if w.head_norm is not None:
                qk.copy_(self._normal(qk)).mul_(w.head_norm)
            swapped = torch.cat([qk[..., half:], qk[..., :half]], -1)
            torch.addcmul(qk * cos, swapped, sin, out=qk)
            h = h + w.out(attention(i, x[:, :heads], x[:, heads:]))
            gate, up = w.gate_up(self._normal(h)).chunk(2, -1)
            h = h + w.down(F.silu(gate).mul_(up))
        return self._normal(h).mul_(self.norm)

    def _normal(self, x: Tensor) -> Tensor:
        """x over the root of its mean square; what the norm's weight does stands in the next matrix."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        return x * norm.square_().mul_(1 / x.shape[-1]).add_(self.config.rms_norm_eps).rsqrt_().to(self.dtype)

    def _bias(self, length: Tensor, span: int) -> Tensor:
        """What to add to the scores of `span` columns: 0 below the length, HIDDEN from there on. [B,1,1,span]"""
        return torch.where(self.numbers(span) < length[:, None], 0.0, HIDDEN).to(self.dtype)[:, None, None]

    def numbers(self, count: int) -> Tensor:
        """0 .. count - 1."""
        if len(self._numbers) < count:
            self._numbers = torch.arange(count * 2, device=self.device)
        return self._numbers[:count]


def partial(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over one part of the columns: (sum of weights times values, largest score, sum of weights).

    q [B,K,N,D] scaled, k [B,K,D,S], v [B,K,S,D], bias [B,1,1,S].
    """
    scores = torch.matmul(q, k).add_(bias)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return torch.matmul(weights, v), top, weights.sum(-1, keepdim=True)


def merged(a: tuple, b: tuple) -> Tensor:
    """Softmax attention over both parts."""
    top = torch.maximum(a[1], b[1])
    wa, wb = (a[1] - top).exp_(), (b[1] - top).exp_()
    return (a[0] * wa + b[0] * wb) / (a[2] * wa + b[2] * wb)
