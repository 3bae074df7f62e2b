"""What a run takes of a rank's memory, worked out before it starts, and how many rollouts fit into what there is.

Sizes are bytes, at the largest shapes that the configuration allows: prompts and responses at their limits. Counted are
tensors; left out: the allocator's gaps and kernels' workspaces (`fit` leaves SPARE for them), the interpreter, and what
the CPU holds for a GPU. The formulas follow the code (engine, sampler, learner); tests hold them against what it takes.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from slca.config import ConfigError, override
from slca.learner import CHUNK_LOGITS, POSITION_STEP
from slca.model import ModelConfig, Policy
from slca.optim import CHUNK
from slca.products import PLAIN_SCORES, bf16_runs, onednn_runs
from slca.sampler import PREFILL_TOKENS, Sampler
from slca.settings import Config, LLMConfig
from slca.slots import GROUP_STEP, WIDTH_STEP, rounded
from slca.weights import read_config

SPARE = 0.08  # of the available memory
FROZEN_CHAT = 2048
BATCH_BYTES = 3 * 8 + 3 * 4  # of a token in `Batch`: ids, labels, mask; two log-probabilities, advantage


@dataclass
class Sizes:
    """Numbers of parameters (matrices: of all blocks, table: embedding or head) and bytes of an element."""

    matrices: int
    tables: int
    table: int
    vectors: int
    adapters: int
    held: int  # per weight, of the learner's policy
    compute: int
    residual: int
    gathered: int  # per weight, where several ranks gather them; else 0
    sampled: int  # per weight and cached number, while sampling

    @property
    def weights(self) -> int:
        return self.matrices + self.tables + self.vectors

    @property
    def trained(self) -> int:
        return self.adapters or self.weights


def sizes(cfg: Config, shape: ModelConfig, world: int, device: str) -> Sizes:
    with torch.device("meta"):
        policy = Policy(replace(shape, num_hidden_layers=1))
    block = dict(policy.model.layers[0].named_parameters())
    matrices = {n.split(".")[-2]: p for n, p in block.items() if p.ndim == 2}
    inside, outside = ([p.numel() for p in found if p.ndim < 2] for found in (block.values(), policy.parameters()))
    vectors = sum(outside) + sum(inside) * (shape.num_hidden_layers - 1)
    adapters = sum(cfg.lora.rank * sum(p.shape) for n, p in matrices.items() if n in cfg.lora.targets)
    table = shape.vocab_size * shape.hidden_size
    units = _units(device)
    held = 2 if cfg.model.dtype == "bf16" else 4
    compute = 2 if held == 2 or cfg.precision == "bf16" and units else 4
    return Sizes(sum(p.numel() for p in matrices.values()) * shape.num_hidden_layers,
                 table * (1 if shape.tie_word_embeddings else 2), table, vectors, adapters * shape.num_hidden_layers,
                 held, compute,
                 compute if world > 1 else held,  # gathered weights have the compute type, and so the residual stream
                 compute if world > 1 else 0, 2 if held == 2 or cfg.rollout.precision == "bf16" and units else 4)


def _units(device: str) -> bool:
    """Does the device compute in bfloat16? A GPU that is planned for without being here does."""
    return device == "cuda" and not torch.cuda.is_available() or bf16_runs(torch.device(device))


def plan(cfg: Config, shape: ModelConfig, world: int, tokenizer_size: int | None = None,
         device: str | None = None) -> dict[str, float]:
    """Bytes a rank by what they are for, and their "peak". tokenizer_size: ids the head is cut to; device: cuda or cpu.

    weights, optimiser, reference, frozen models and batch are always there; gradients, gathered weights and activations
    only while learning; sampling's and validation's intermediates only then. Rollout copy and KV cache stay if
    rollout.keep_copy.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    s, c = sizes(cfg, shape, world, device), cfg.rollout
    vocabulary = min(shape.vocab_size, tokenizer_size or shape.vocab_size)
    prompts, group_size = ceil(cfg.rl.prompts_per_step / world), cfg.rl.group_size
    groups = max(1, min(prompts, c.max_rows // group_size))

    def cache(*how: int) -> float:
        return sum(cache_bytes(shape, s.sampled, *size) for size in reserved(*how, device))

    found = {
        "weights": (s.weights * s.held + s.adapters * 4) / world,
        "gradients": s.trained * 4 / world * (2 if cfg.log.stream_gradients else 1),
        "optimiser": max(_optimiser_state(cfg, s)) / world,
        "reference": s.weights * s.held / world * (cfg.rl.enabled and cfg.loss.kl_coef > 0 and not s.adapters),
        "frozen": _frozen(cfg, device),
        "batch": BATCH_BYTES * prompts * group_size * (c.max_prompt_tokens + c.max_response_tokens),
        # embedding, head and two blocks: the one that runs and the next
        "gathered": s.gathered * (s.tables + 2 * s.matrices / shape.num_hidden_layers),
        "activations": max(*(learner_bytes(cfg, shape, s, part, vocabulary, device) for part in passes(cfg, world)),
                           _optimiser_step(cfg, s, world, device)),
        "rollout copy": _packed(s, device),
        "KV cache": cache(group_size, groups, prompts, c.max_prompt_tokens, c.max_response_tokens),
        "sampling": max(s.table * (s.held + s.sampled),  # the largest weight while it is packed
                        sampler_bytes(shape, s, groups * group_size, c.max_prompt_tokens, c.max_response_tokens,
                                      vocabulary)),
    }
    # a validation has a sampler of its own
    length = cfg.eval.max_prompt_tokens + cfg.eval.max_response_tokens
    tasks = min(256, max(cfg.data.eval_tasks, cfg.data.validation_tasks))  # evaluation/toucan.py takes 256 at a time
    rows = sampler_rows(cfg, 1, ceil(tasks / world), length, world, device)
    found["validation"] = _packed(s, device) + cache(1, rows, rows, cfg.eval.max_prompt_tokens,
                                                     cfg.eval.max_response_tokens) + sampler_bytes(
        shape, s, rows, 0, length, vocabulary)
    always = sum(found[name] for name in ("weights", "optimiser", "reference", "frozen", "batch"))
    copy = found["rollout copy"] + found["KV cache"]
    learner = found["gradients"] + found["gathered"] + found["activations"]
    found["peak"] = always + max(copy + found["sampling"], copy * c.keep_copy + max(learner, found["validation"]))
    return found


def _frozen(cfg: Config, device: str) -> float:
    """Models of simulator, judge and summariser in process: weights once, for each asker a packed copy and a cache.

    The cache is reckoned with chats of FROZEN_CHAT tokens: how long the tools' definitions are is not known here.
    """
    askers = [llm for llm, kind in ((cfg.simulator.llm, cfg.simulator.responder), (cfg.judge.llm, cfg.judge.kind))
              if kind == "model"]
    if cfg.eval.summariser:
        askers.append(LLMConfig(path=cfg.eval.summariser, concurrency=cfg.rollout.max_rows,
                                max_new_tokens=cfg.eval.max_response_tokens))
    size = 2 if _units(device) else 4
    found, loaded = 0.0, set()
    for llm in askers:
        shape = read_config(Path(llm.path))
        with torch.device("meta"):
            weights = sum(p.numel() for p in Policy(shape).parameters())
        found += 2 * weights * size + cache_bytes(shape, size, llm.concurrency, FROZEN_CHAT + llm.max_new_tokens)
        found -= weights * size * (llm.path in loaded)
        loaded.add(llm.path)
    return found


# --- the learner -----------------------------------------------------------------------------------------------------

@dataclass
class Pass:
    """A micro-batch of `tokens`: `prompts` of `prompt` columns run once, and `rows` of `width` columns behind them."""

    tokens: int
    prompts: int = 0
    prompt: int = 0
    rows: int = 0
    width: int = 0


def passes(cfg: Config, world: int) -> list[Pass]:
    """The largest that the configuration allows: few long rows, all rows of a group, and plain rows (SFT)."""
    budget, prompt, most = cfg.micro_batch_tokens, cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens
    found = []
    if cfg.rl.enabled:
        for rows in {max(1, min(cfg.rl.group_size, (budget - prompt) // most)), cfg.rl.group_size}:
            row = min(most, max(1, (budget - prompt) // rows))
            if rows == 1:
                row = most  # a row over the budget goes alone
            groups = max(1, min(budget // (prompt + rows * row), ceil(cfg.rl.prompts_per_update / world)))
            width = WIDTH_STEP << max(0, (row - 1) // WIDTH_STEP).bit_length()  # as `pack` pads it
            found.append(Pass(rounded(groups * (prompt + rows * row), POSITION_STEP), groups,
                              rounded(prompt, WIDTH_STEP), groups * rows, width))
    if cfg.sft.enabled:
        longest = rounded(cfg.sft.max_tokens, WIDTH_STEP)
        rows = max(1, min(ceil(cfg.sft.rows_per_step / world), budget // longest))
        found.append(Pass(rounded(rows * longest, POSITION_STEP), rows, longest))
    return found


def block_bytes(shape: ModelConfig, s: Sizes, m: Pass, device: str) -> float:
    """What one block keeps for its backward pass."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    norm = 4 if device == "cuda" and s.compute == 2 else s.residual  # autocast on a GPU norms in float32
    casts = 5 if s.compute == 2 and norm == 4 else 2  # inputs of q, k, v, gate and up, cast anew for each
    tokens = (shape.hidden_size * (2 * norm * (1 if device == "cuda" else 2) + casts * s.compute)  # CPU: x, x / rms
              + (shape.model_type == "qwen3") * (q + kv) * (norm if device == "cuda" else 2 * s.compute)
              + s.compute * (2 * q + 4 * shape.intermediate_size)  # rotated q, input of o; gate, silu, up, product
              + 4 * shape.num_attention_heads)  # log of the softmax's sum
    row_columns, prompt_columns = m.rows * m.width, m.prompts * m.prompt
    return (m.tokens * tokens + s.compute * (
        3 * q * prompt_columns  # keys and values repeated for every query head; output
        + 2 * q * row_columns + 2 * kv * m.rows * (m.prompt + m.width)  # q, output; keys, values with the prompt's
        + shape.num_attention_heads * _scores(s, m, device)))


def _scores(s: Sizes, m: Pass, device: str) -> int:
    """What a head keeps of its scores: nothing, but for short bfloat16 blocks on a CPU (`products.attend`)."""
    if device == "cuda" or s.compute == 4:
        return 0
    blocks = ((m.rows, m.width, m.prompt + m.width), (m.prompts, m.prompt, m.prompt))
    return sum(count * n * span for count, n, span in blocks if n * span <= PLAIN_SCORES)


def learner_bytes(cfg: Config, shape: ModelConfig, s: Sizes, m: Pass, vocabulary: int, device: str) -> float:
    """Peak of one forward and backward pass beyond weights and gradients, and what is gathered of them."""
    block, layers, hidden = block_bytes(shape, s, m, device), shape.num_hidden_layers, m.tokens * shape.hidden_size
    recomputed = cfg.model.checkpoint_blocks
    kept = hidden * s.residual * (layers + 2) if recomputed else block * layers + 2 * hidden * s.residual
    groups = shape.num_attention_heads // shape.num_key_value_heads
    kept += m.rows * m.width * (m.prompt + m.width) * (groups * s.compute + 1)  # the masks of rows, as bias and as bool
    kept += hidden * (s.residual + 2 * s.compute)  # what the head reads
    # autocast casts weights that are float32 here: trained ones once a pass, frozen ones at each use
    casts = s.compute < s.held and not s.gathered
    cast, table = 2 * s.matrices * casts, vocabulary * shape.hidden_size
    chunk = min(4096, max(256, CHUNK_LOGITS // vocabulary)) * vocabulary
    head = chunk * (8 + s.compute % 4) + table * s.compute * casts  # logits, also in float32, and their exponentials
    mlp = shape.intermediate_size * m.tokens * s.compute
    if s.adapters:
        of_head = waits = of_matrix = reduce = last = 0
    else:
        own = s.gathered or s.held  # of a gradient's element, before it is summed over the ranks
        of_head = table * (4 + max(own, s.compute)) - 4 * chunk  # float32 sum, and its next summand or its cast
        waits = s.table * own * shape.tie_word_embeddings  # the head's gradient, until the embedding's comes
        of_matrix = shape.intermediate_size * shape.hidden_size * (4 + s.compute % 4)
        reduce = s.gathered and 2 * (s.gathered + 4) * s.matrices / layers  # two blocks on their way over the ranks
        last = max(s.table * own * (3 if shape.tie_word_embeddings else 1),  # the embedding's, both, and their sum
                   s.gathered and s.tables * (s.gathered + 4))
    work = 2 * mlp + hidden * s.residual + of_matrix + waits + reduce
    if recomputed:
        forward = max(head, 3 * mlp) + cast * (not s.adapters)
        return max(kept + max(forward, head + of_head, block + work), last)
    reference = (cast + 3 * mlp) * (cfg.loss.kl_coef > 0)  # its pass runs while this one's activations are there
    return max(kept + cast + max(head + of_head, work, reference), last)


def _optimiser_state(cfg: Config, s: Sizes) -> list[float]:
    """Of each stage: AdamW's two moments, or Muon's one (float32) for the matrices and AdamW's for the rest."""
    moments = 0 if cfg.optim.offload else 4 if cfg.optim.state == "bf16" else 8
    found = [moments * s.trained] * cfg.rl.enabled
    if cfg.sft.enabled and cfg.sft.optimizer == "muon":
        rest = 0 if s.adapters else s.tables + s.vectors
        found.append(4 * (s.trained - rest) + moments * rest)
    return [*found, moments * s.trained * cfg.sft.enabled * (cfg.sft.optimizer == "adamw")]


def _optimiser_step(cfg: Config, s: Sizes, world: int, device: str) -> float:
    """Intermediates: PyTorch's AdamW on a GPU takes the root of all second moments at once."""
    if cfg.optim == type(cfg.optim)():
        return 4 * s.trained / world if device == "cuda" else 8 * s.table / world
    return 6 * 4 * min(CHUNK, s.trained / world)


# --- sampling --------------------------------------------------------------------------------------------------------

def sampler_rows(cfg: Config, group_size: int, groups: int, max_len: int, world: int, device: str) -> int:
    """Slots of a rank's sampler for that many groups: whole ones, `rollout.max_rows` at most, but one at least.

    Groups of one (an evaluation) hold a prompt a row; there are no more than fit into the cache that training takes.
    """
    c = cfg.rollout
    rows = group_size * max(1, min(groups, c.max_rows // group_size))
    if group_size > 1:
        return rows
    prompts = ceil(cfg.rl.prompts_per_step / world)
    training = sum(slots * columns for slots, columns in reserved(
        cfg.rl.group_size, max(1, min(prompts, c.max_rows // cfg.rl.group_size)), prompts, c.max_prompt_tokens,
        c.max_response_tokens, device))
    return max(1, min(rows, training // reserved(1, 1, 1, 0, max_len, device)[0][1]))


def reserved(group_size: int, groups: int, prompts: int, prompt: int, response: int,
             device: str) -> list[tuple[int, int]]:
    """(slots, columns) of the row cache and of the prompt cache for so many groups at a time, as the sampler has them.

    A group of one holds its prompt in the row's own slot. There are up to twice as many slots for prompts, since one
    whose last rows still run keeps its own while the next group starts; prompts: how many come in all.
    """
    look, step, columns = (16, GROUP_STEP, 256) if device == "cuda" else (1, 1, WIDTH_STEP)
    if group_size == 1:
        return [(groups, rounded(rounded(prompt + response, columns) + look, WIDTH_STEP)), (0, 0)]
    return [(group_size * groups, rounded(rounded(response, columns) + look, WIDTH_STEP)),
            (rounded(min(2 * groups, prompts) + 1, step), rounded(rounded(prompt, WIDTH_STEP) + look, WIDTH_STEP))]


def reserve(sampler: Sampler, group_size: int, prompts: int, prompt: int, response: int) -> None:
    """Take the sampler's KV cache in one piece, at the size of the plan: growing would hold the old and the new."""
    sampler.sizes = reserved(group_size, len(sampler.owner) // group_size, prompts, prompt, response,
                             sampler.device.type)
    sampler.take_room()


def room(sampler: Sampler, group_size: int) -> int:
    """Whole groups that can be admitted now: their rows are free, and so are slots for their prompts."""
    free, slots = sampler.free // group_size, sampler.prompts.kv.shape[2]
    if group_size == 1 or not slots:
        return free
    return min(free, slots - 1 - sum(prompt is not None for prompt in sampler.groups))


def cache_bytes(shape: ModelConfig, size: int, slots: int, columns: int) -> int:
    """Keys and values of all layers."""
    return shape.num_hidden_layers * 2 * slots * shape.num_key_value_heads * columns * shape.head_dim * size


def sampler_bytes(shape: ModelConfig, s: Sizes, rows: int, prompt: int, columns: int, vocabulary: int) -> float:
    """Peak of what sampling makes beside weights and cache: a prefill, a tool turn, or a step of all rows."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    groups = shape.num_attention_heads // shape.num_key_value_heads
    tokens = max(PREFILL_TOKENS, rounded(prompt or columns, WIDTH_STEP))  # a longer prompt goes alone
    prefill = tokens * s.sampled * (4 * shape.hidden_size + 5 * q + 4 * kv + 4 * shape.intermediate_size)
    seen = prompt + columns
    turn = PREFILL_TOKENS * seen * (groups * (s.sampled + 1) + 1) + PREFILL_TOKENS * s.sampled * (
        4 * shape.hidden_size + 4 * shape.intermediate_size)  # the mask of new tokens, as bool and as bias
    turn += min(rows, PREFILL_TOKENS // WIDTH_STEP) * seen * 4 * kv * s.sampled  # keys, values gathered, then joined
    step = rows * (vocabulary * (s.sampled + 12) + 3 * shape.num_attention_heads * seen * s.sampled)
    return max(prefill, turn, step)


def _packed(s: Sizes, device: str) -> float:
    """The engine's weights. Where oneDNN multiplies, its layout is beside the plain one (float32), or instead of it
    (bfloat16)."""
    if device == "cuda" or not onednn_runs(torch.empty(0, dtype=torch.bfloat16 if s.sampled == 2 else torch.float32)):
        return s.weights * s.sampled
    return s.sampled * (s.weights + s.table + (s.matrices if s.sampled == 4 else 0))


# --- what there is ---------------------------------------------------------------------------------------------------

def available() -> float:
    """Bytes this rank may use: free ones and those torch holds already on a GPU; else the machine's or the
    container's (cgroup v1, v2) that are free, shared by the local ranks."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):
            root = Path("/sys/fs/cgroup") if kinds == "" else Path("/sys/fs/cgroup/memory")
            names = ("memory.max", "memory.current") if kinds == "" else (
                "memory.limit_in_bytes", "memory.usage_in_bytes")
            for folder in {root / path.lstrip("/"), root}:  # in a container the path is often the host's
                limit, used = (_number(folder / name) for name in names)
                free += [limit - used] if limit is not None and used is not None else []
    return max(0, min(free)) / ranks


def _number(path: Path) -> int | None:
    """None: no such file, or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def report(found: dict[str, float], limit: float | None = None) -> str:
    """A table of a plan in GB (1e9 bytes), for the start of a run."""
    end = "" if limit is None else f" of {limit / 1e9:.2f} GB available"
    return "memory of a rank, planned:\n" + "\n".join(
        f"  {name:13}{size / 1e9:8.2f} GB" for name, size in found.items() if size) + end


HELPS = ("model.checkpoint_blocks=true", "model.dtype=bf16", "optim.state=bf16", "optim.offload=true", "precision=bf16",
         "rollout.precision=bf16", "rollout.keep_copy=false", "loss.kl_coef=0", "lora.rank=16")


def fit(cfg: Config, shape: ModelConfig, world: int, available_bytes: float, tokenizer_size: int | None = None,
        device: str | None = None) -> int:
    """Rollout rows that fit (whole groups), `rollout.max_rows` at most.

    Raises ValueError with the figures and what would help where one group does not fit.
    """
    def need(cfg: Config, rows: int) -> float:
        cfg = replace(cfg, rollout=replace(cfg.rollout, max_rows=rows))
        return plan(cfg, shape, world, tokenizer_size, device)["peak"]

    group, limit = cfg.rl.group_size, available_bytes * (1 - SPARE)
    rows = max(1, cfg.rollout.max_rows // group) * group
    while rows > group and need(cfg, rows) > limit:
        rows -= group
    least = need(cfg, rows)
    if least <= limit:
        return rows
    halved = [f"{name}={value // 2}" for name, value in (
        ("micro_batch_tokens", cfg.micro_batch_tokens), ("rollout.max_prompt_tokens", cfg.rollout.max_prompt_tokens),
        ("eval.max_prompt_tokens", cfg.eval.max_prompt_tokens)) if value > 1]
    saved = []
    for change in (*HELPS, *halved):
        try:
            less = least - need(override(cfg, [change]), group)
        except ConfigError:
            continue
        if less > 0.01 * least:
            saved.append((less, f"{change} (-{less / 1e9:.1f} GB)"))
    helps = ", ".join(text for _, text in sorted(saved, reverse=True)) or "none of the settings alone"
    table = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in plan(
        replace(cfg, rollout=replace(cfg.rollout, max_rows=group)), shape, world, tokenizer_size, device).items() if v)
    raise ValueError(f"memory: with one group of {group} rollouts a rank needs {least / 1e9:.1f} GB ({table}), "
                     f"{limit / 1e9:.1f} GB are available ({available_bytes / 1e9:.1f} less {SPARE:.0%} for the "
                     f"allocator); what helps: {helps}; or more ranks ({world} now)")
