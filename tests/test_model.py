"""Proves: the mask of an appended block is the lower right one, padding and batch mates change no bit, a fresh policy
is fixed by its seed, every bad configuration is named, the bf16 attention written for CPUs stays near float32 in value
and gradient, products by oneDNN have the values and gradients of torch's own, and blocks that compute again in the
backward pass change no bit of any gradient and keep nothing. (The KV cache is tested in test_engine.py, logits against
transformers in test_weights.py, checkpointed blocks on two ranks in test_lora.py.)
"""
from __future__ import annotations

import pytest
import torch

from slca import products
from slca.learner import pack
from slca.model import Block, ModelConfig, Policy, checkpoint_blocks, new_policy
from slca.products import attend, linear, score_bias

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
MODELS = {
    "qwen2": dict(num_key_value_heads=2),
    "qwen3": dict(num_key_value_heads=1, head_dim=12, tie_word_embeddings=False),
    "llama": dict(num_key_value_heads=4, rope_theta=5e5, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)),
}
EVERY_MODEL = pytest.mark.parametrize("family", MODELS)


def drawn(config: ModelConfig, seed: int = 0, table: float = 0.16) -> Policy:
    """A policy with loud blocks and neither flat nor certain distributions, whatever `new_policy` starts from."""
    policy, draw = Policy(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.ndim == 2:
                std = table if "embed" in name or "lm_head" in name else p.shape[1] ** -0.5
                quiet = (2 * config.num_hidden_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                p.normal_(0, std * quiet, generator=draw)
            elif "bias" in name:
                p.zero_()
    return policy


def make(family: str = "qwen2", seed: int = 0) -> Policy:
    policy = drawn(ModelConfig(family, **SIZES, **MODELS[family]), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.ndim == 1:  # biases start at 0 and norms at 1, where they could not be missed
                p += 0.3 * torch.randn(p.shape, generator=draw)
    return policy.requires_grad_(False)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(q, k, v, seen):
    """Attention head by head in float64; seen [N,S]."""
    out = torch.empty_like(q, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            scores = (q[b, h].double() @ k[b, g].double().T) / q.shape[-1] ** 0.5
            out[b, h] = scores.masked_fill(~seen[b], float("-inf")).softmax(-1) @ v[b, g].double()
    return out.float()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_appended_block_sees_the_lower_right_triangle(kv_heads):
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 3, 8, generator=draw)
    k, v = (torch.randn(2, kv_heads, 7, 8, generator=draw) for _ in range(2))
    lower_right = (torch.arange(7) <= torch.arange(4, 7)[:, None]).expand(2, 3, 7)
    want = by_hand(q, k, v, lower_right)
    bias = score_bias(lower_right, 4 // kv_heads, torch.float32)
    torch.testing.assert_close(attend(q, k, v, bias), want, rtol=1e-5, atol=1e-5)
    # the trap: the causal flag aligns to the upper left, and this data tells the two apart
    flag = torch.nn.functional.scaled_dot_product_attention(q, *(x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)),
                                                            is_causal=True)
    assert (flag - want).abs().max() > 0.5


@EVERY_MODEL
def test_right_padding_and_batch_mates_change_nothing(family):
    policy, ids = make(family), tokens(3, 12)
    lengths = [12, 5, 1]
    other = ids.clone()
    for b, n in enumerate(lengths):
        other[b, n:] = 0
    a, b = policy(ids), policy(other)
    for row, n in enumerate(lengths):
        assert torch.equal(a[row, :n], b[row, :n])
        torch.testing.assert_close(policy(ids[row:row + 1, :n])[0], a[row, :n], rtol=1e-5, atol=1e-5)
        if n < 12:
            assert not torch.equal(a[row, n:], b[row, n:])  # the padding itself does differ


def test_new_policy_is_fixed_by_its_seed():
    config = ModelConfig(**SIZES)
    torch.manual_seed(1)
    a = new_policy(config, 5)
    torch.manual_seed(2)
    b, c = new_policy(config, 5), new_policy(config, 6)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True) if x.ndim == 2)
    assert not any(p.any() for n, p in a.named_parameters() if n.endswith("bias"))


BAD = {
    "family": (dict(model_type="mamba"), "model_type 'mamba' is not supported"),
    "width": (dict(hidden_size=30), "hidden_size 30 is not a multiple of num_attention_heads 4"),
    "odd head": (dict(head_dim=7), "head_dim 7 must be even"),
    "groups": (dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "rope": (dict(rope_scaling={"rope_type": "yarn"}), "rope_scaling type 'yarn' is not supported"),
    "rope, older name": (dict(rope_scaling={"type": "dynamic"}), "rope_scaling type 'dynamic' is not supported"),
}
RAW = dict(model_type="qwen2", hidden_size=32, num_attention_heads=4, vocab_size=61)
BAD_RAW = {
    "sliding window": (dict(use_sliding_window=True), "use_sliding_window and mlp_bias are not supported"),
    "mlp bias": (dict(mlp_bias=True), "use_sliding_window and mlp_bias are not supported"),
    "activation": (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "no type": (dict(model_type=None), "has no model_type"),
    "rope, newer layout": (dict(rope_parameters={"rope_type": "longrope"}), "rope_scaling type 'longrope'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configuration(case):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(SIZES | change))


@pytest.mark.parametrize("case", BAD_RAW)
def test_bad_config_json(case):
    change, message = BAD_RAW[case]
    assert ModelConfig.from_hf(RAW).attention_bias  # fine without the change
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(RAW | change)


# ---- bf16 on a CPU: attention without the fused kernel

def test_bf16_attention_is_close_to_float32():
    """Unit normal data, 24 positions: values within .02, and the gradients' relative error (Euclidean) within .02."""
    draw = torch.Generator().manual_seed(4)
    shapes = (2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)
    q, k, v = (torch.randn(s, generator=draw).to(torch.bfloat16) for s in shapes)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    rough = [x.clone().requires_grad_() for x in (q, k, v)]
    weight = torch.randn(2, 4, 24, 16, generator=draw)
    want, got = attend(*exact, None), attend(*rough, None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)
    (want * weight).sum().backward()
    (got.float() * weight).sum().backward()
    for a, b in zip(exact, rough, strict=True):
        assert (b.grad.float() - a.grad).norm() / a.grad.norm() < 0.02


def test_bf16_attention_is_causal():
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=draw).to(torch.bfloat16) for _ in range(3))
    before = attend(q, k, v, None)
    k[:, :, 5:], v[:, :, 5:] = 50.0, -50.0
    after = attend(q, k, v, None)
    assert torch.equal(before[:, :, :5], after[:, :, :5]) and not torch.equal(before[:, :, 5:], after[:, :, 5:])


@EVERY_MODEL
def test_bf16_autocast_of_the_whole_model(family):
    """Within 3 % of float32 (gradients 6 %) in Euclidean norm; weights and gradients stay float32."""
    policy, ids = make(family).requires_grad_(True), tokens(2, 20)
    weight = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(6))
    results = []
    for bf16 in (False, True):
        policy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = policy.hidden(ids)
        (hidden.float() * weight).sum().backward()
        results.append((hidden.detach().float(), torch.cat([p.grad.flatten() for p in policy.parameters()
                                                            if p.grad is not None])))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters() if p.grad is not None)
    for exact, rough, bound in zip(*results, (0.03, 0.06), strict=True):
        assert 1e-4 < (rough - exact).norm() / exact.norm() < bound  # above 0: the bf16 path did run


def test_bfloat16_that_onednn_only_emulates_is_not_used(monkeypatch):
    """AVX-512 without avx512_bf16: oneDNN calls it supported, and takes six times as long as in float32."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    for units in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda units=units: units)
        assert products.bf16_runs(torch.device("cpu")) == units
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(products.platform, "machine", lambda: "aarch64")
    assert products.bf16_runs(torch.device("cpu"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(600, 24), (20, 30, 24)])
def test_products_by_onednn_are_torchs(monkeypatch, bias, shape):
    draw = torch.Generator().manual_seed(0)
    x, weight, b, up = (torch.randn(s, generator=draw) for s in (shape, (40, 24), (40,), (*shape[:-1], 40)))
    results, used, plain = [], [], products.onednn
    monkeypatch.setattr(products, "onednn", lambda *a: used.append(1) or plain(*a))
    monkeypatch.setattr(products, "AVX512", True)  # oneDNN gives the same without, and is only slower
    monkeypatch.setattr(products, "MKL_512", False)
    for rows in (512, 10**9):  # the second is more than there are: torch's own
        monkeypatch.setattr(products, "MANY_ROWS", rows)
        leaves = [t.clone().requires_grad_() for t in ((x, weight, b) if bias else (x, weight))]
        out = linear(*leaves)
        (out * up).sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    assert len(used) == (3 if torch.backends.mkldnn.is_available() else 0)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


# ---- activation checkpointing

def kept_bytes(run) -> int:
    """What autograd saves, each storage once."""
    sizes = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(sizes.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@EVERY_MODEL
def test_blocks_that_compute_again_change_no_bit(monkeypatch, family, packed, bf16):
    policy, ids = make(family).requires_grad_(True), tokens(4, 40)
    ids[:2, :9], ids[2:, :9] = ids[0, :9], ids[2, :9]  # two groups
    line = pack(ids, [40, 31, 40, 12], [9] * 4, [0, 0, 1, 1])[0]
    runs, results, plain = [], [], Block._layers
    monkeypatch.setattr(Block, "_layers", lambda self, *a: runs.append(torch.is_grad_enabled()) or plain(self, *a))
    for on in (False, True):
        checkpoint_blocks(policy, on)
        policy.zero_grad()
        runs.clear()
        out = []

        def forward(out=out):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                out.append(policy.hidden_packed(line) if packed else policy.hidden(ids))
        size = kept_bytes(forward)
        assert len(runs) == 3
        (out[0].float() * torch.linspace(-1, 1, 32)).sum().backward()
        assert len(runs) == (6 if on else 3)  # once more, on the way back
        results.append((size, out[0].detach(), [p.grad for p in policy.parameters() if p.grad is not None]))
        runs.clear()
        with torch.no_grad():
            forward()
        assert runs == [False] * 3
    (plainly, a, grads), (less, b, again) = results
    assert torch.equal(a, b) and len(grads) == len(again) and all(map(torch.equal, grads, again))
    assert less < 0.2 * plainly  # embedding, last norm and the rows' masks
