"""What the benchmarks share: model shapes, equal models, alternating runs, the machine's limits, tables and the result.

Every script runs alone (`python tests/benchmarks/rollout.py --help`), offline, and installs nothing. Peer and own code
take turns in one process, so that a busy machine slows both; a ratio above 1 means that ours is faster. Left out:
trained weights (random ones cost the same), GPUs, and any statistic beyond medians.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

# before torch loads, so that threads and child processes start with it
os.environ["OMP_NUM_THREADS"] = dict(zip(sys.argv, sys.argv[1:], strict=False)).get("--threads", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whether or not the package is installed

import torch
import torch.nn.functional as F

from slca.model import ModelConfig, Policy, new_policy
from slca.products import bf16_runs, onednn_runs

SHAPES = {name: dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                          "intermediate_size", "vocab_size"), sizes, strict=True)) for name, sizes in {
    "tiny": (32, 2, 4, 2, 64, 256),  # for --quick
    "a": (128, 4, 4, 2, 512, 2048),  # 1.25 M parameters
    "b": (384, 8, 6, 2, 1536, 8192),  # 20.5 M
    "c": (896, 24, 14, 2, 4864, 151936),  # 494 M, Qwen2.5-0.5B's shape
}.items()}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
if not bf16_runs(torch.device("cpu")):  # six to a hundred times slower there: neither side would be used so
    del DTYPES["bf16"]
CACHES = ("dynamic", "static")  # of transformers
POSITIONS, ROPE_THETA = 4096, 1e6
CACHE_BYTES = 32e6  # what fits into the processor's cache is not bound by the memory


def arguments(doc: str, *peers: str, **flags: str) -> argparse.Namespace:
    """The options all scripts take, and extra on/off `flags` (name: help). Ends the script where a peer is missing."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default 1)")
    parser.add_argument("--model", nargs="+", default=["a", "b"], choices=list(SHAPES), help="shapes (default a b)")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side, taken in turn (default 5)")
    parser.add_argument("--quick", action="store_true", help="tiny model and lengths, one pair: a smoke test")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    args = parser.parse_args()
    if args.quick:
        args.model, args.pairs = ["tiny"], 1
    if "bf16" not in DTYPES:
        print("this CPU has no bfloat16 units: float32 only")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", FutureWarning)  # the peers' of each other
    if not any(getattr(args, name) for name in flags):  # the extra parts have no peer
        need(*peers)
    return args


def need(*peers: str) -> None:
    missing = [name for name in peers if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f'error: {", ".join(missing)} not installed: pip install -e ".[bench]"')


# --- models ----------------------------------------------------------------------------------------------------------

def own_policy(name: str, **changes: int) -> Policy:
    shape = ModelConfig(**SHAPES[name] | changes, rope_theta=ROPE_THETA, max_position_embeddings=POSITIONS)
    return new_policy(shape).eval()


def models(name: str, dtype: torch.dtype = torch.float32):
    """(transformers' Qwen2ForCausalLM in `dtype`, our Policy in float32): the same random weights, logits compared."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    peer = Qwen2ForCausalLM(Qwen2Config(**SHAPES[name], max_position_embeddings=POSITIONS, tie_word_embeddings=True,
                                        bos_token_id=None, eos_token_id=None, pad_token_id=None,
                                        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA})).eval()
    with torch.no_grad():
        for key, p in peer.named_parameters():
            if key.endswith("bias"):
                p.normal_(0, 0.02)
    own = own_policy(name)
    own.load_state_dict({key: value for key, value in peer.state_dict().items() if key in own.state_dict()})
    ids = prompts_of(2, 40, name)
    with torch.no_grad():
        gap = float((peer(torch.tensor(ids)).logits - own(torch.tensor(ids))).abs().max())
    if not gap < 1e-4:
        raise SystemExit(f"error: the models' logits differ by {gap:.1e}: the benchmark would compare unlike things")
    return peer.to(dtype), own


def prompts_of(count: int, length: int, name: str, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPES[name]["vocab_size"], (count, length), generator=draw).tolist()


def peer_generate(peer, ids: torch.Tensor, new: int, cache: str) -> tuple[torch.Tensor, dict[str, float]]:
    """generate() at temperature 1 -> (all ids, {"prefill", "decode"} in seconds); decode is `new` whole steps.

    cache "static" is not compiled on a CPU: transformers does that on accelerators only.
    """
    stamps, start = [], time.perf_counter()

    def stamp(_, scores):  # called with the logits of every step, so once more than there are decode steps
        stamps.append(time.perf_counter())
        return scores

    more = {"cache_implementation": "static"} if cache == "static" else {}
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new + 1, do_sample=True, top_k=0,
                        pad_token_id=0, logits_processor=[stamp], **more)
    assert out.shape[1] == ids.shape[1] + new + 1
    return out, {"prefill": stamps[0] - start, "decode": stamps[-1] - stamps[0]}


# --- timing ----------------------------------------------------------------------------------------------------------

Runs = dict[str, list[dict[str, float]]]


def alternate(work: dict[str, Callable[[], dict | None]], pairs: int = 5,
              rivals: Sequence[Sequence[str]] = ()) -> Runs:
    """Run each once to warm up, then all in turn, `pairs` times in one sitting -> {name: one dict of seconds a run}.

    A function may return its own split in seconds; the whole call is added as "total". Of each set of rivals only the
    one that was fastest in its warm-up run goes on: a peer's best variant, without the time that the others take.
    """
    runs: Runs = {name: [] for name in work}
    for turn in range(pairs + 1):
        for name in runs:
            start = time.perf_counter()
            split = work[name]() or {}
            runs[name].append(split | {"total": time.perf_counter() - start})
        if turn == 0:
            first = {name: runs[name].pop()["total"] for name in runs}
            for names in rivals:
                best = min(names, key=first.__getitem__)
                for name in set(names) - {best}:
                    print(f"left out: {name}, {first[name]:.2f} s in its warm-up run, {best} {first[best]:.2f} s")
                    del runs[name]
    return runs


def mid(runs: Runs, name: str, key: str = "total") -> float:
    return median(run[key] for run in runs[name])


def best_of(runs: Runs, prefix: str, key: str = "total") -> str:
    """Name of the fastest entry that starts with `prefix`."""
    return min((name for name in runs if name.startswith(prefix)), key=lambda name: mid(runs, name, key))


def ratio(runs: Runs, peer: str, own: str, key: str = "total") -> dict[str, float]:
    """How many times faster own is: median over the pairs, and the ratio of the medians."""
    each = [p[key] / o[key] for p, o in zip(runs[peer], runs[own], strict=True)]
    return {"paired": round(median(each), 3), "medians": round(mid(runs, peer, key) / mid(runs, own, key), 3)}


# --- what the machine allows -----------------------------------------------------------------------------------------

def best_time(f: Callable, repeats: int = 5) -> float:
    f()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def machine(quick: bool = False) -> dict[str, float]:
    """Measured here and now: read bandwidth in bytes/s ("memory"), matrix products in FLOP/s, by dtype."""
    x = torch.ones(2**20 if quick else 2**26)
    found = {"memory": 4 * x.numel() / best_time(x.sum)}
    shapes = [(64, 64, 64)] if quick else [(1024, 1024, 1024), (4096, 384, 1536), (2048, 896, 4864)]
    for name, dtype in DTYPES.items():
        found[name] = 0.0
        for m, k, n in shapes:
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
            ways = [lambda a=a, b=b: F.linear(a, b)]
            if onednn_runs(b):
                ways.append(lambda a=a, b=b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
            with torch.no_grad():
                found[name] = max(found[name], 2 * m * k * n / min(best_time(f, 3) for f in ways))
    return found


def decode_bound(name: str, batch: int, length: float, dtype: str, limits: dict[str, float]) -> float:
    """Seconds that one decode step over `batch` rows of `length` tokens takes at least: bytes or FLOPs, the slower."""
    s = SHAPES[name]
    hidden, layers, heads, kv = (s[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                                "num_key_value_heads"))
    head_dim = hidden // heads
    weights = layers * (hidden * (heads + 2 * kv) * head_dim + hidden**2 + 3 * hidden * s["intermediate_size"])
    weights += s["vocab_size"] * hidden
    size = DTYPES[dtype].itemsize * (weights + 2 * layers * batch * kv * length * head_dim)
    flops = 2 * batch * weights + 4 * batch * layers * heads * head_dim * length
    return max(size / limits["memory"] if size > CACHE_BYTES else 0.0, flops / limits[dtype])


# --- output ----------------------------------------------------------------------------------------------------------

def table(title: str, rows: Sequence[dict]) -> None:
    """Rows of equal keys, as aligned columns under their names."""
    names = list(rows[0])
    lines = [names] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip(), flush=True)


def about(args: argparse.Namespace) -> dict:
    """What every result says of its run."""
    return {"threads": args.threads, "pairs": args.pairs, "quick": args.quick, "torch": torch.__version__}


def finish(result: dict) -> None:
    """The one machine-readable line, last on stdout."""
    sys.stdout.flush()
    print(json.dumps(result), flush=True)
