"""Proves: our decoder computes what transformers computes, folders travel both ways, and bad checkpoints are refused.

Random small Qwen2, Qwen3 and Llama models (tied and untied, one to four queries a key, a head_dim of its own, llama3
rope scaling) are saved there and loaded here and the reverse: float32 logits within 1e-5, from one file, from shards
and from bfloat16, and 64 greedy tokens from our cache are theirs. Without transformers the loader's own rules are still
tested: every kind of missing, unexpected, misshapen or unreadable file gives an error that names it, and a save leaves
the old file or the new one.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slca import weights
from slca.model import ModelConfig, Policy
from slca.sampler import generate
from slca.tokenizer import load_tokenizer, train_bpe
from slca.weights import load_policy, save_policy

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
# name -> (family, what differs from SIZES): 4, 2 and 1 key-value heads for 4 query heads, tied and not, with a head_dim
# that is hidden/heads or not, at the rotary bases in use
MODELS = {
    f"{family} 4:{kv} {'tied' if tied else 'untied'}": (family, dict(
        num_key_value_heads=kv, tie_word_embeddings=tied, head_dim=head_dim, rope_theta=base, rms_norm_eps=eps,
        **(dict(rope_scaling=LLAMA3) if family == "llama" and tied else {})))
    for family, base, eps in (("qwen2", 1e6, 1e-6), ("qwen3", 1e6, 1e-6), ("llama", 5e5, 1e-5))
    for kv, tied, head_dim in ((4, True, 8), (4, False, 6), (2, True, 16), (2, False, 8), (1, True, 12), (1, False, 16))
} | {
    "qwen2 without head_dim": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "llama biased": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=False, attention_bias=True)),
    "llama linear rope": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=True,
                                        rope_scaling=dict(rope_type="linear", factor=4.0))),
}
IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=MODELS)
def theirs(request):
    """A transformers model with random weights far from its initialisation, norms and biases included."""
    transformers = pytest.importorskip("transformers")
    family, differs = MODELS[request.param]
    config = transformers.AutoConfig.for_model(family, max_position_embeddings=128, **{**SIZES, **differs})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    shake(model)
    return model


def shake(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)


def logits(model):
    with torch.no_grad():
        out = model(IDS)
    return getattr(out, "logits", out).float()


def close(a, b):
    assert b.std() > 0.3  # a test on flat logits would prove nothing
    assert (a - b).abs().max() <= 1e-5


def test_their_folder_gives_their_logits_here(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    close(logits(load_policy(tmp_path)), logits(theirs))


def test_their_shards_give_their_logits_here(theirs, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file() and len(list(tmp_path.glob("*.safetensors"))) > 2
    close(logits(load_policy(tmp_path)), logits(theirs))


def test_our_folder_gives_our_logits_there(theirs, tmp_path):
    import transformers

    theirs.save_pretrained(tmp_path / "a")
    ours = load_policy(tmp_path / "a")
    shake(ours, seed=2)  # other weights than theirs, under our names alone
    save_policy(ours, tmp_path / "b")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(again) is type(theirs) and again.dtype == torch.float32
    close(logits(again.eval()), logits(ours))


def test_bfloat16_files(theirs, tmp_path):
    import transformers

    theirs.bfloat16().save_pretrained(tmp_path / "a")
    ours = load_policy(tmp_path / "a")
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    # Rounding happened at save. (Read back: `.bfloat16()` has rounded their rotary frequencies too.)
    load = transformers.AutoModelForCausalLM.from_pretrained
    close(logits(ours), logits(load(tmp_path / "a", dtype=torch.float32).eval()))
    half = load_policy(tmp_path / "a", dtype=torch.bfloat16)
    save_policy(half, tmp_path / "b")
    assert load(tmp_path / "b", dtype="auto").dtype == torch.bfloat16
    close(logits(load(tmp_path / "b", dtype=torch.float32).eval()), logits(ours))


def test_greedy_tokens_from_the_cache_are_theirs(theirs, tmp_path):
    """64 steps after two prompts; in our batch there is a third of another length."""
    prompts = torch.tensor([[5, 17, 60, 2, 9], [90, 3, 41, 8, 12]])
    theirs.generation_config.eos_token_id = None

    def run():
        """Their rows, and the least lead of a greedy token: below rounding errors a comparison would mean nothing."""
        rows = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=False,
                               pad_token_id=0)
        with torch.no_grad():
            best = theirs(rows).logits[:, prompts.shape[1] - 1:-1].topk(2).values
        return rows, (best[..., 0] - best[..., 1]).min().item()

    for seed in range(1, 5):  # weights without a near tie
        shake(theirs, seed)
        rows, lead = run()
        if lead > 1e-4:
            break
    assert lead > 1e-4 and rows.shape == (2, 69) and len(rows.unique()) > 10
    theirs.save_pretrained(tmp_path)
    ours = generate(load_policy(tmp_path), [*prompts.tolist(), [7] * 12], max_new_tokens=64, temperature=0)
    assert [c.ids for c in ours[:2]] == rows[:, prompts.shape[1]:].tolist()


# --- without transformers ------------------------------------------------------------------------------------------


def policy(tied=True, family="qwen3", seed=0, **differs):
    config = dict(SIZES, num_key_value_heads=2, head_dim=16, model_type=family, tie_word_embeddings=tied)
    model = Policy(ModelConfig(**{**config, **differs}))
    shake(model, seed)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_save_then_load_is_bit_equal(family, tied, tmp_path):
    ours = policy(tied, family, rope_scaling=LLAMA3 if family == "llama" else None, rope_theta=12345.0)
    save_policy(ours, tmp_path)
    again = load_policy(tmp_path)
    assert again.config == ours.config
    assert all(p.requires_grad and p.is_leaf for p in again.parameters())
    assert torch.equal(logits(again), logits(ours))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as f:
        assert ("lm_head.weight" in f.keys()) is not tied
        assert f.metadata() == {"format": "pt"}  # other tools ask for it
    again(IDS).logsumexp(-1).sum().backward()
    assert again.model.embed_tokens.weight.grad.abs().sum() > 0


def test_a_loaded_policy_does_not_share_the_file(tmp_path):
    save_policy(policy(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    ours = load_policy(tmp_path)
    expected = logits(ours)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * len(before))  # in place: the same inode
    assert torch.equal(logits(ours), expected)


def test_tokenizer_and_stop_travel_with_the_weights(tmp_path):
    tokenizer = train_bpe(["a b"], 300, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    save_policy(policy(), tmp_path, tokenizer)
    assert load_tokenizer(tmp_path).stop_ids == tokenizer.stop_ids == (2, 0)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 2
    load_policy(tmp_path)


def test_a_failed_save_leaves_the_old_weights(tmp_path, monkeypatch):
    first = policy()
    save_policy(first, tmp_path)

    def half_written(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        save_policy(policy(seed=9), tmp_path)
    monkeypatch.undo()
    assert torch.equal(logits(load_policy(tmp_path)), logits(first))


@pytest.fixture
def saved(tmp_path):
    save_policy(policy(), tmp_path)
    return tmp_path, load_file(tmp_path / "model.safetensors")


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def shard(folder, tensors):
    """The same tensors in two shards."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names, places = sorted(tensors), {}
    for k, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, folder / f"part-{k}.safetensors")
        places |= dict.fromkeys(part, f"part-{k}.safetensors")
    write_index(folder, places)
    return places


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_redundant_head_and_rotary_buffers_are_harmless(saved):
    folder, tensors = saved
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
    }
    rewrite(folder, tensors | extra)
    assert torch.equal(logits(load_policy(folder)), logits(policy()))
    shard(folder, tensors | extra)
    assert torch.equal(logits(load_policy(folder)), logits(policy()))


def test_one_whole_file_wins_over_an_old_index(saved):
    folder, tensors = saved
    shard(folder, {name: torch.zeros_like(t) for name, t in tensors.items()})
    rewrite(folder, tensors)
    assert torch.equal(logits(load_policy(folder)), logits(policy()))


def drop(folder, tensors, name):
    rewrite(folder, {n: t for n, t in tensors.items() if n != name})


Q = "model.layers.1.self_attn.q_norm.weight"
BAD_WEIGHTS = {
    "missing": (lambda f, t: drop(f, t, Q), rf"model.safetensors: missing keys: {Q}"),
    "unexpected": (lambda f, t: rewrite(f, t | {"model.extra": torch.ones(1)}), "unexpected keys: model.extra"),
    "first few of many": (lambda f, t: rewrite(f, t | {f"x{i}": torch.ones(1) for i in range(9)}),
                          "unexpected keys: x0, x1, x2, x3 and 5 more"),
    "wrong shape": (lambda f, t: rewrite(f, t | {Q: torch.ones(17)}), rf"wrong shapes: {Q} \[17\] for \[16\]"),
    "transposed": (lambda f, t: rewrite(f, t | {"model.layers.0.mlp.up_proj.weight": torch.ones(32, 48)}),
                   r"up_proj.weight \[32, 48\] for \[48, 32\]"),
    "integers": (lambda f, t: rewrite(f, t | {Q: torch.ones(16, dtype=torch.int8)}), rf"not floating point: {Q}"),
    "other head though tied": (lambda f, t: rewrite(f, t | {"lm_head.weight": torch.zeros(97, 32)}),
                               "ties the head, but lm_head.weight differs"),
    "no head though untied": (lambda f, t: edit_config(f, tie_word_embeddings=False),
                              "missing keys; config.json does not tie the head: lm_head.weight"),
    "more layers": (lambda f, t: edit_config(f, num_hidden_layers=2), "unexpected keys: model.layers.2"),
    "fewer layers": (lambda f, t: edit_config(f, num_hidden_layers=4), "missing keys: model.layers.3"),
    "other family": (lambda f, t: edit_config(f, model_type="llama"), "unexpected keys: .*k_norm"),
    "not safetensors": (lambda f, t: (f / "model.safetensors").write_bytes(b"junk" * 9), "not a safetensors file"),
    "cut short": (lambda f, t: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-4]),
                  "not a safetensors file, or a damaged one"),
    "bad config": (lambda f, t: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
    "config is a list": (lambda f, t: (f / "config.json").write_text("[]"), "config.json: a JSON object"),
    "unknown family": (lambda f, t: edit_config(f, model_type="gpt2"), "config.json: model_type 'gpt2'"),
    "no family": (lambda f, t: edit_config(f, model_type=None), "config.json: .*model_type"),
    "size is text": (lambda f, t: edit_config(f, hidden_size="x"), "config.json: hidden_size must be a whole number"),
    "size below 0": (lambda f, t: edit_config(f, hidden_size=-4), "config.json: hidden_size must be a whole number"),
    "no heads": (lambda f, t: edit_config(f, num_key_value_heads=0), "config.json: num_key_value_heads must be"),
    "rope base is text": (lambda f, t: edit_config(f, rope_theta="x"), "config.json: rope_theta must be a number"),
    "eps is text": (lambda f, t: edit_config(f, rms_norm_eps="x"), "config.json: rms_norm_eps must be a number"),
    "scaling is text": (lambda f, t: edit_config(f, rope_scaling="x"), "config.json: .*rope_scaling"),
    "scaling without its keys": (lambda f, t: edit_config(f, rope_scaling={"rope_type": "llama3", "factor": 8}),
                                 "config.json: rope_scaling of type llama3 needs numbers for low_freq_factor"),
    "no size": (lambda f, t: edit_config(f, hidden_size=None), "config.json: missing keys: hidden_size"),
    "unknown rope": (lambda f, t: edit_config(f, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
                     "config.json: .*'yarn'"),
    "quantised": (lambda f, t: edit_config(f, quantization_config={"bits": 4}), "quantised weights are not read"),
}


@pytest.mark.parametrize("harm, words", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_folders_are_refused_by_name(harm, words, saved):
    folder, tensors = saved
    harm(folder, tensors)
    with pytest.raises(ValueError, match=words):
        load_policy(folder)


BAD_SHARDS = {
    "shard missing": (lambda f, t, p: (f / "part-1.safetensors").unlink(), FileNotFoundError,
                      "index.json: missing shards: part-1.safetensors"),
    "index is no JSON": (lambda f, t, p: (f / "model.safetensors.index.json").write_text("{"), ValueError,
                         "index.json: not valid JSON"),
    "no weight_map": (lambda f, t, p: write_index(f, None), ValueError, "weight_map is missing"),
    "promised tensor absent": (lambda f, t, p: save_file({}, f / "part-0.safetensors"), ValueError,
                               "part-0.safetensors: the index promises tensors that are not in it"),
    "tensor outside the index": (lambda f, t, p: write_index(f, {k: v for k, v in p.items() if k != Q}), ValueError,
                                 f"holds tensors that the index does not place in it: {Q}"),
    "path out of the folder": (lambda f, t, p: write_index(f, p | {Q: "../part-0.safetensors"}), ValueError,
                               "outside the folder: ../part-0"),
    "missing key": (lambda f, t, p: shard(f, {k: v for k, v in t.items() if k != Q}), ValueError,
                    f"index.json: missing keys: {Q}"),
}


@pytest.mark.parametrize("harm, error, words", BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_bad_shards_are_refused_by_name(harm, error, words, saved):
    folder, tensors = saved
    places = shard(folder, tensors)
    harm(folder, tensors, places)
    with pytest.raises(error, match=words):
        load_policy(folder)


@pytest.mark.parametrize("gone, words", [
    ("", "no such model folder"), ("config.json", "config.json: no such file"),
    ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json")])
def test_missing_files_are_named(gone, words, saved):
    folder, _ = saved
    if gone:
        (folder / gone).unlink()
    with pytest.raises(FileNotFoundError, match=words):
        load_policy(folder if gone else folder / "nowhere")
