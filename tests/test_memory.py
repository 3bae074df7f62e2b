"""Proves: the plan holds what a run really takes.

Weights, gradients, optimiser and KV cache to the byte (a few numbers aside), against the tensors themselves. The
activations of the largest micro-batch within 25 %, and not below 95 %: by counting the storages that live during it, on
a model of 27 million parameters, and with the shapes of Qwen2.5-3B, 7B and Qwen3-8B on tensors without memory. A run
that cannot fit is refused with its figures; the rows that fit are whole groups, and one more would not.
(What a GPU's allocator and kernels take beside tensors is not measured, nor is what FSDP gathers.)
"""
from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slca import learner, lora, memory, products
from slca.config import load_config, override
from slca.memory import fit, plan, report, reserve, room, sampler_rows
from slca.model import ModelConfig, Packed, Policy, RowBlock, checkpoint_blocks, new_policy
from slca.optim import optimizers
from slca.sampler import Sampler, row_stream
from slca.settings import Config

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = ModelConfig("qwen2", 8000, 512, 1408, 8, 8, 2)  # 27 million parameters
B3 = ModelConfig("qwen2", 151936, 2048, 11008, 36, 16, 2)
B7 = ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, tie_word_embeddings=False)
B8 = ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128, tie_word_embeddings=False)
TOKENS = 151_665  # of Qwen2.5's tokenizer


def settings(*changes: str) -> Config:
    return override(Config(), ["sft.enabled=false", *changes])


def size(tensors) -> int:
    return sum(t.nbytes for t in tensors)


# ---- to the byte

@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", [[], ["optim.state=bf16"], ["optim.offload=true"], ["lora.rank=4"],
                                     ["lora.rank=4", "model.dtype=bf16", "lora.targets=[q_proj, down_proj]"]])
def test_weights_gradients_and_optimiser(changes, tied):
    cfg, shape = settings(*changes), ModelConfig("qwen2", 301, 32, 48, 3, 4, 2, tie_word_embeddings=tied)
    policy = new_policy(shape).to(torch.bfloat16 if cfg.model.dtype == "bf16" else torch.float32)
    if cfg.lora.rank:
        lora.add_lora(policy, cfg.lora.rank, cfg.lora.alpha, cfg.lora.targets, 0)
    policy(torch.arange(20)[None]).float().sum().backward()
    found = optimizers(policy, "adamw", 0.1, 0.0, (0.9, 0.999), options=cfg.optim)
    found[0].step()
    got = plan(cfg, shape, 1, device="cpu")
    assert got["weights"] == size(policy.parameters())
    assert got["gradients"] == size(p.grad for p in policy.parameters() if p.grad is not None)
    state = [t for s in found[0].state.values() for name, t in s.items() if name != "step"]
    assert got["optimiser"] == (0 if cfg.optim.offload else size(state))
    assert got["reference"] == 0
    kept = plan(override(cfg, ["loss.kl_coef=0.1"]), shape, 1, device="cpu")["reference"]
    assert kept == (0 if cfg.lora.rank else got["weights"])  # the adapters' base is the reference


def test_muon_and_several_ranks():
    cfg, shape = override(Config(), ["rl.enabled=false"]), ModelConfig("qwen2", 301, 32, 48, 3, 4, 2)
    policy = new_policy(shape)
    policy(torch.arange(20)[None]).sum().backward()
    found = optimizers(policy, "muon", 0.1, 0.0, (0.9, 0.999))
    for optimizer in found:
        optimizer.step()
    state = [t for o in found for s in o.state.values() for name, t in s.items() if name != "step"]
    one, eight = (plan(cfg, shape, world, device="cpu") for world in (1, 8))
    assert one["optimiser"] == size(state) and one["gathered"] == 0
    assert all(eight[name] == one[name] / 8 for name in ("weights", "gradients", "optimiser"))
    block = sum(p.numel() for p in policy.model.layers[0].parameters() if p.ndim == 2)
    assert eight["gathered"] == 4 * (301 * 32 + 2 * block) and eight["rollout copy"] == one["rollout copy"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kv_cache_is_what_the_sampler_has_when_every_row_is_full(monkeypatch, device, precision):
    """Also with the rounding of a GPU. Three groups of four, prompts and responses at their limits, and new ones."""
    monkeypatch.setattr(memory, "bf16_runs", lambda d: True)
    cfg = settings("rl.group_size=4", "rollout.max_rows=12", "rollout.max_prompt_tokens=70",
                   "rollout.max_response_tokens=300", f"rollout.precision={precision}")
    shape = ModelConfig("qwen2", 61, 32, 48, 2, 4, 2)
    want = plan(cfg, shape, 1, device=device)["KV cache"]
    rows = sampler_rows(cfg, 4, cfg.rl.prompts_per_step, 370, 1, device)
    sampler = Sampler(new_policy(shape), rows, 370, dtype=torch.bfloat16 if precision == "bf16" else None)
    if device == "cuda":
        sampler.look_every, sampler.row_step, sampler.column_step = 16, 8, 256
    sampler.device = torch.device(device)  # as it reads for the rounding; the memory itself is the CPU's
    reserve(sampler, 4, cfg.rl.prompts_per_step, 70, 300)
    sampler.device = torch.device("cpu")
    memories = [sampler.cache.kv, sampler.prompts.kv]
    assert rows == 12 and size(memories) == want
    prompts, admitted, live = [[7] * 70] * 5, 0, []
    while admitted < 5 or live:
        more = prompts[admitted:admitted + room(sampler, 4)]
        groups = sampler.admit(more, [[row_stream(admitted + g, m).random(300, np.float32) for m in range(4)]
                                      for g in range(len(more))])
        admitted, live = admitted + len(more), [*live, *(row for group in groups for row in group)]
        done = sampler.decode(live, [300 - row.drawn for row in live], 2)
        sampler.release(done)
        live = [row for row in live if row not in done]
    assert sampler.cache.kv is memories[0] and sampler.prompts.kv is memories[1]  # nothing has grown


def test_room_waits_for_a_prompt_slot():
    """Rows are free, but every slot for a prompt is held by a group with one row left."""
    sampler = Sampler(new_policy(ModelConfig("qwen2", 61, 32, 48, 2, 4, 2)), 8, 40)
    reserve(sampler, 4, 100, 20, 20)
    assert sampler.prompts.kv.shape[2] == 5  # two groups at a time, two that end late, and an empty one
    held = []
    for left in (1, 1, 1, 0):
        (rows,) = sampler.admit([[5] * 9], [[np.zeros(9, np.float32)] * 4])
        sampler.release(rows[1:])
        held += rows[:1]
        assert room(sampler, 4) == left and sampler.free >= 4
    sampler.release(held[:1])
    assert room(sampler, 4) == 1
    sampler.release(held[1:])
    assert room(sampler, 4) == 2 and room(sampler, 1) == 8


def test_an_evaluation_takes_no_more_cache_than_training():
    cfg = load_config([CONFIGS / "qwen2.5-7b.yaml"])
    rows = sampler_rows(cfg, 1, 256, 24576 + 12288, 32, "cuda")
    training = plan(cfg, B7, 32, device="cuda")["KV cache"]
    each = memory.cache_bytes(B7, 2, 1, memory.reserved(1, 1, 1, 24576, 12288, "cuda")[0][1])
    assert 1 <= rows < 128 and rows * each <= training < (rows + 1) * each
    assert sampler_rows(cfg, 1, 256, 200, 32, "cuda") == 128 and sampler_rows(cfg, 1, 3, 200, 32, "cuda") == 3


# ---- activations

class Live(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known | given:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, key: int, count: int) -> None:
        self.known.discard(key)
        self.now -= count


def with_gradients(policy: Policy, cfg: Config) -> Policy:
    """As in the middle of an update: gradients are there and the next micro-batch adds to them."""
    checkpoint_blocks(policy, cfg.model.checkpoint_blocks)
    if cfg.lora.rank:
        lora.add_lora(policy, cfg.lora.rank, cfg.lora.alpha, cfg.lora.targets, 0)
    for p in policy.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    return policy


LENGTHS = ["rl.group_size=4", "rollout.max_prompt_tokens=200", "rollout.max_response_tokens=100"]


@pytest.mark.parametrize("recompute", [True, False])
def test_activations_of_a_small_model(recompute):
    """One micro-batch of the update with rows at their limits, on a CPU in float32."""
    cfg = settings(*LENGTHS, "micro_batch_tokens=600", f"model.checkpoint_blocks={str(recompute).lower()}")
    policy = with_gradients(new_policy(SMALL), cfg)
    ids = torch.randint(0, 8000, (4, 300), generator=torch.Generator().manual_seed(0))
    ids[:, :200] = ids[0, :200]
    mask = (torch.arange(300) >= 200).expand(4, -1)
    with Live() as live:
        learner.group_logprobs(policy, ids, mask, [300] * 4, [200] * 4, [0] * 4, 8000).sum().backward()
    assert 0.95 < plan(cfg, SMALL, 1, device="cpu")["activations"] / live.peak < 1.25


FAKE = {  # shape, layers, settings
    "3B": (B3, 6, []), "3B, all kept": (B3, 4, ["model.checkpoint_blocks=false"]),
    "3B float32": (B3, 6, ["precision=fp32"]), "7B": (B7, 6, []),
    "7B adapters": (B7, 6, ["lora.rank=16", "model.dtype=bf16"]),
    "7B adapters, all kept": (B7, 4, ["lora.rank=16", "model.dtype=bf16", "model.checkpoint_blocks=false"]),
    "8B": (B8, 6, []), "8B, all kept": (B8, 4, ["model.checkpoint_blocks=false"]),
}


@pytest.mark.parametrize("case", FAKE)
def test_activations_of_large_models(monkeypatch, case):
    """The same code with tensors that have no memory, autocast to bfloat16 and the fused attention of a GPU."""
    shape, layers, changes = FAKE[case]
    shape = replace(shape, num_hidden_layers=layers)
    cfg = settings("rl.group_size=8", "rollout.max_prompt_tokens=2048", "rollout.max_response_tokens=1024",
                   "micro_batch_tokens=10240", "precision=bf16", "model.checkpoint_blocks=true", *changes)
    for module in (memory, learner):
        monkeypatch.setattr(module, "bf16_runs", lambda d: True)
    for module in (memory, products):
        monkeypatch.setattr(module, "PLAIN_SCORES", 0)
    monkeypatch.setattr(products, "onednn_runs", lambda w: False)
    monkeypatch.setattr(lora, "first_a", lambda rank, size, draw: torch.empty(rank, size))
    (part,) = memory.passes(cfg, 1)
    assert (part.tokens, part.rows, part.width) == (10240, 8, 1024)
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16 if cfg.model.dtype == "bf16" else torch.float32)
        policy = Policy(shape)
        torch.set_default_dtype(torch.float32)
        policy = with_gradients(policy, cfg)
        ints = dict(dtype=torch.long)
        rows = RowBlock(slice(2048, 10240), (8, 1024), torch.zeros(8192, **ints), torch.zeros(8, **ints),
                        torch.zeros(8, 1024, 3072, dtype=torch.bool))
        packed = Packed(*torch.zeros(2, 10240, **ints), (1, 2048), torch.zeros(2048, **ints), [rows], 3072)
        with Live() as live:
            with learner.precision_context(cfg.precision, torch.device("cpu")):
                logp = learner._packed_logprobs(policy, packed, torch.zeros(8192, **ints), torch.zeros(8192, **ints),
                                                shape.vocab_size, 1.0)
            logp.sum().backward()
    masks = rows.mask.nbytes  # part of the plan, made before the pass
    assert 0.95 < plan(cfg, shape, 1, device="cpu")["activations"] / (live.peak + masks) < 1.25


def test_passes_are_the_largest_micro_batches():
    cfg = override(Config(), ["rollout.max_prompt_tokens=100", "rollout.max_response_tokens=50", "rl.group_size=4",
                              "micro_batch_tokens=256", "sft.max_tokens=60", "sft.rows_per_step=3"])
    few, all_rows, plain = sorted(memory.passes(cfg, 1), key=lambda p: -p.width)
    assert (few.prompts, few.rows, few.width, few.tokens) == (1, 3, 64, 256)  # 100 + 3 * 50, rounded up
    assert (all_rows.rows, all_rows.width, all_rows.tokens) == (4, 64, 256)  # 39 tokens each
    assert (plain.rows, plain.prompts, plain.prompt, plain.tokens) == (0, 3, 64, 256)
    long = override(cfg, ["micro_batch_tokens=50", "sft.enabled=false"])  # a row over the budget goes alone
    assert {(p.rows, p.tokens) for p in memory.passes(long, 1)} == {(1, 256), (4, 256)}
    many = override(cfg, ["micro_batch_tokens=1200", "rl.prompts_per_update=2", "sft.enabled=false"])
    assert {(p.prompts, p.rows) for p in memory.passes(many, 1)} == {(2, 8)}  # no more prompts than an update has
    assert {(p.prompts, p.rows) for p in memory.passes(many, 2)} == {(1, 4)}


# ---- what fits

SHORT = ["rollout.max_prompt_tokens=8192", "rollout.max_response_tokens=4096", "eval.max_prompt_tokens=8192",
         "eval.max_response_tokens=4096", "micro_batch_tokens=16384"]
LEAN = ["model.checkpoint_blocks=true", "rollout.keep_copy=false"]
CARDS = {  # of 80 GB: file, shape, ranks, settings, rows that fit
    "3B, all weights, one card": ("qwen2.5-3b", B3, 1, [*LEAN, *SHORT, "optim.state=bf16"], 64),
    "3B, all weights, one card, the paper's lengths": ("qwen2.5-3b", B3, 1, [*LEAN, "optim.state=bf16",
                                                                             "optim.offload=true"], 16),
    "7B, adapters, one card": ("qwen2.5-7b", B7, 1, [*LEAN, *SHORT, "lora.rank=16", "model.dtype=bf16"], 64),
    "7B, adapters, one card, the paper's lengths": ("qwen2.5-7b", B7, 1, [*LEAN, "lora.rank=16", "model.dtype=bf16"],
                                                    16),
    "7B, all weights, 8 cards": ("qwen2.5-7b", B7, 8, LEAN, 16),
    "7B, all weights, 32 cards": ("qwen2.5-7b", B7, 32, LEAN, 32),
}


@pytest.mark.parametrize("case", CARDS)
def test_what_fits_on_cards_of_80_gb(case):
    file, shape, world, changes, least = CARDS[case]
    cfg = load_config([CONFIGS / f"{file}.yaml"], changes)
    rows = fit(cfg, shape, world, 80e9, TOKENS, "cuda")
    assert rows >= least and rows % 16 == 0
    found = [plan(override(cfg, [f"rollout.max_rows={n}"]), shape, world, TOKENS, "cuda") for n in (rows, rows + 16)]
    limit = 80e9 * (1 - memory.SPARE)
    assert found[0]["peak"] <= limit and (found[1]["peak"] > limit or rows == 128)
    text = report(found[0], 80e9)
    assert f"peak {found[0]['peak'] / 1e9:12.2f} GB of 80.00 GB available".split() == text.splitlines()[-1].split()


KEPT = ["rollout.keep_copy=true", "model.checkpoint_blocks=false"]


@pytest.mark.parametrize("file, shape, world, changes, words", [
    ("qwen2.5-7b", B7, 1, KEPT, ["one group of 16 rollouts", "weights 30.5", "optimiser 60.9", "73.6 GB are available",
                               "80.0 less 8%", "model.checkpoint_blocks=true (-", "optim.offload=true (-60.9 GB)",
                               "lora.rank=16 (-", "more ranks (1 now)"]),
    ("qwen2.5-3b", B3, 1, [*KEPT, "model.checkpoint_blocks=true"],
     ["optim.state=bf16 (-12.3 GB)", "loss.kl_coef=0 (-12.3 GB)", "rollout.keep_copy=false"]),
    ("qwen2.5-7b", B7, 1, [*KEPT, "model.checkpoint_blocks=true", "lora.rank=16"],
     ["model.dtype=bf16 (-", "available"])])
def test_what_cannot_fit_is_refused_with_its_figures(file, shape, world, changes, words):
    with pytest.raises(ValueError) as error:
        fit(load_config([CONFIGS / f"{file}.yaml"], changes), shape, world, 80e9, TOKENS, "cuda")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert ("model.checkpoint_blocks=true (-" in str(error.value)) == ("model.checkpoint_blocks=true" not in changes)


def test_the_main_job_fits_a_small_machine():
    cfg = load_config([CONFIGS / "tiny.yaml"])
    assert fit(cfg, ModelConfig(), 1, 4e9, device="cpu") == 128
    assert 8 < fit(cfg, ModelConfig(), 1, 0.7e9, device="cpu") < 128
    with pytest.raises(ValueError, match="0.0 GB are available"):
        fit(cfg, ModelConfig(), 1, 1e7, device="cpu")


def test_available_memory(monkeypatch):
    """No more than the machine has, shared by its ranks; a container's limit counts, of either kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole = memory.available()
    assert 1e8 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.available() == pytest.approx(whole / 4, rel=0.5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    for line, names in (("0::/job", ("memory.max", "memory.current")),
                        ("4:memory:/job", ("memory.limit_in_bytes", "memory.usage_in_bytes"))):
        files = {"/proc/self/cgroup": line, "/proc/meminfo": "MemAvailable: 9000000 kB\n"}
        root = "/sys/fs/cgroup" if line.startswith("0") else "/sys/fs/cgroup/memory"
        files |= {f"{root}/job/{names[0]}": "5000000000", f"{root}/job/{names[1]}": "1000000000",
                  f"{root}/{names[0]}": "max"}

        def read(self, files=files, **how):
            if str(self) not in files:
                raise FileNotFoundError(self)
            return files[str(self)]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", read)
            assert memory.available() == 4e9
