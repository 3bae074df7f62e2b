"""Every setting: one tree of frozen dataclasses. A field carries its default, its sentence and its range.

`config.py` reads them from YAML and checks them. Left out: any default that depends on the machine.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def d(default: Any, doc: str, **limits: float) -> Any:
    """A documented field. limits: lo, hi (both inclusive), above, below (both exclusive), for each number in it."""
    if isinstance(default, type):
        return field(default_factory=default, metadata={"doc": doc, "limits": limits})
    return field(default=default, metadata={"doc": doc, "limits": limits})


FRACTION = {"lo": 0.0, "hi": 1.0}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class PolicyConfig:
    path: str | None = d(None, "Folder of a pretrained policy (config, safetensors, tokenizer); null: a fresh one.")
    family: Literal["qwen2", "qwen3", "llama"] = d("qwen2", "Fresh model: which decoder layout it follows.")
    hidden_size: int = d(128, "Fresh model: width of the residual stream.", lo=1)
    intermediate_size: int = d(512, "Fresh model: width of the feed-forward layer.", lo=1)
    num_layers: int = d(4, "Fresh model: number of decoder layers.", lo=1)
    num_heads: int = d(4, "Fresh model: query heads; divides hidden_size.", lo=1)
    num_kv_heads: int = d(2, "Fresh model: key/value heads; divides num_heads.", lo=1)
    rope_theta: float = d(10000.0, "Fresh model: base of the rotary position frequencies.", above=1)
    vocab_size: int = d(1024, "Fresh model: size of the tokenizer that is trained with it.", lo=2)
    dtype: Literal["fp32", "bf16"] = d("fp32", "Type the weights are held in; bf16 only frozen, under adapters (lora).")
    checkpoint_blocks: bool = d(False, "Compute a block's activations again in the backward pass: memory, not results.")


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = d(0, "Rank of the adapters that are trained instead of the weights; 0: the weights.", lo=0)
    alpha: float = d(16.0, "An adapter's product counts alpha / rank times.", above=0)
    targets: tuple[Literal[PROJECTIONS], ...] = d(PROJECTIONS, "The matrices of a block that get one.")


@dataclass(frozen=True)
class OptimConfig:
    state: Literal["fp32", "bf16"] = d("fp32", "Type of AdamW's moments; bf16 is rounded at random, so without bias.")
    offload: bool = d(False, "Keep AdamW's moments in the CPU's memory: memory, not results.")


@dataclass(frozen=True)
class Flaws:
    """How often the demonstrations of the embedded world show each bad habit: what RL then has to repair."""

    serial: float = d(0.6, "Parallel calls are made one a turn instead of together.", **FRACTION)
    drop_result: float = d(0.6, "The reply leaves out one of the results.", **FRACTION)
    misquote: float = d(0.15, "The reply states a wrong value for a result.", **FRACTION)
    stop_after_first: float = d(0.3, "A dependent task stops after its first call.", **FRACTION)
    omit: float = d(0.08, "The reply is given without the calls it needs.", **FRACTION)
    omit_family: float = d(0.6, "The same, in the tool families where this is the habit.", **FRACTION)
    repeat: float = d(0.12, "A call is made a second time.", **FRACTION)
    repeat_family: float = d(0.75, "The same, in the tool families where this is the habit.", **FRACTION)
    needless: float = d(0.03, "A call is made where none is needed.", **FRACTION)


@dataclass(frozen=True)
class TaskMixConfig:
    """Shares of the embedded world's kinds of task; they sum to 1."""

    single: float = d(0.28, "One call answers it.", **FRACTION)
    parallel: float = d(0.34, "Several calls due in one step.", **FRACTION)
    dependent: float = d(0.22, "A second call needs the first one's result.", **FRACTION)
    history: float = d(0.10, "An earlier turn of the dialogue is needed.", **FRACTION)
    no_call: float = d(0.06, "No tool is needed; gold is empty.", lo=0.0, hi=0.1)


@dataclass(frozen=True)
class DataConfig:
    kind: Literal["world", "toucan"] = d(
        "world", "world: tasks made by the embedded tool world; toucan: files, of any kind that slca.data reads.")
    train: str | None = d(None, "kind toucan: file, or folder of files, of RL tasks.")
    sft: str | None = d(None, "kind toucan: file, or folder of files, of demonstrations.")
    heldout: str | None = d(None, "kind toucan: file, or folder of files, for validation and the final tables.")
    bad_rows: Literal["raise", "skip"] = d("raise", "kind toucan: a row that cannot be used ends the run, or is left "
                                           "out with a warning.")
    tools_per_task: int = d(3, "kind world: tools offered in a prompt, of its 20 families.", lo=1, hi=20)
    eval_tasks: int = d(
        200, "Held-out tasks behind the final tables; of files, evenly over them.", lo=1)
    validation_tasks: int = d(64, "Held-out tasks behind the validations while training.", lo=1)
    flaws: Flaws = d(Flaws, "kind world: bad habits in the demonstrations.")
    mix: TaskMixConfig = d(TaskMixConfig, "kind world: shares of the kinds of task.")


@dataclass(frozen=True)
class ChatConfig:
    parallel: Literal["list", "blocks"] = d(
        "list", "Form of parallel calls: list is one block with a JSON list (the paper's), blocks is native Qwen's.")


@dataclass(frozen=True)
class RolloutConfig:
    max_assistant_turns: int = d(10, "A rollout ends after this many turns of the policy.", lo=1)
    max_tool_turns: int = d(6, "A rollout ends after this many rounds of tool results.", lo=0)
    max_calls_per_turn: int = d(20, "Calls of one turn that are executed; the rest are not.", lo=1)
    max_tool_chars: int = d(2048, "A longer tool result keeps its two ends around a marker.", lo=16)
    max_prompt_tokens: int = d(512, "Training leaves tasks with a longer prompt out and counts them.", lo=1)
    max_response_tokens: int = d(320, "Tokens after the prompt, tool results included.", lo=1)
    malformed_call: Literal["observe", "stop"] = d(
        "observe", "A turn with a malformed call gets an error observation (ours) or ends the rollout (the paper's).")
    temperature: float = d(1.0, "Sampling temperature of training rollouts; the learner uses the same.", above=0)
    precision: Literal["fp32", "bf16"] = d("fp32", "Weights and KV cache while sampling; fp32: the policy's own type.")
    keep_copy: bool = d(True, "Keep the sampler's weights and cache during the update; false frees them in between.")
    max_rows: int = d(128, "Rows of the KV cache: rollouts sampled at a time on one rank.", lo=1)


@dataclass(frozen=True)
class LLMConfig:
    """A frozen language model, as simulator or judge."""

    path: str | None = d(None, "model: folder of its weights and tokenizer.")
    url: str | None = d(None, "http: base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")
    name: str | None = d(None, "http: the model that is asked for; null: the first that the server lists.")
    key_env: str | None = d(None, "http: the environment variable that holds the server's key; null: none.")
    temperature: float = d(0.6, "Its sampling temperature; 0 is greedy.", lo=0)
    max_new_tokens: int = d(512, "Tokens of an answer at most.", lo=1, hi=16384)
    concurrency: int = d(16, "Answers written at a time: rows of the KV cache (model), connections (http).", lo=1)
    timeout_s: float = d(540.0, "http: seconds of one try.", above=0, hi=86400)
    retries: int = d(2, "http: tries after the first, with growing pauses.", lo=0)
    cache: str | None = d(None, "Folder that keeps its answers by what was asked, so that a run repeats; null: none.")


@dataclass(frozen=True)
class SimulatorConfig:
    responder: Literal["rules", "model", "http", "python"] = d(
        "rules", "What answers a valid call: offline rules, a frozen model in process or at a server, own functions.")
    python: str | None = d(None, "responder python: file of the functions that are the tools.")
    llm: LLMConfig = d(LLMConfig(), "responder model or http: the frozen model.")
    seed: int = d(0, "Seed of the values that query tools answer with, and of a frozen model.", lo=0, hi=2**32 - 1)
    use_schema: bool = d(True, "Check calls against the task's schemas; false is the paper's condition without SGLS.")
    timeout_s: float = d(30.0, "Seconds a Python function or callable has for a call; then the call has failed.",
                         above=0, hi=86400)


@dataclass(frozen=True)
class JudgeConfig:
    kind: Literal["rules", "model", "http"] = d(
        "rules", "What rates replies: offline rules, or a frozen model in process or at a server.")
    llm: LLMConfig = d(LLMConfig(temperature=0.0), "kind model or http: the frozen model.")
    noise: float = d(0.0, "rules: chance that a rating moves one step, to study an unreliable judge.", **FRACTION)
    seed: int = d(0, "Seed of that noise, and of a frozen model.", lo=0, hi=2**32 - 1)
    failure_score: float = d(0.0, "Summary score when the judge fails or its rating cannot be read.", **FRACTION)
    timeout_s: float = d(120.0, "Seconds a judge of your own has for the replies of a step; the rest failed.",
                         above=0, hi=86400)


@dataclass(frozen=True)
class ProcessWeights:
    """Weights of the five process sub-scores (Eq. 22)."""

    format: float = d(0.10, "Share of call blocks that are valid.", lo=0)
    name: float = d(0.25, "F1 of the tool names.", lo=0)
    key: float = d(0.15, "Overlap of the argument names.", lo=0)
    value: float = d(0.20, "Share of argument values that are right.", lo=0)
    parallel: float = d(0.30, "The first step has the right number of calls.", lo=0)


@dataclass(frozen=True)
class RewardMix:
    process: float = d(1.0, "Weight of the process score in the total.", lo=0)
    summary: float = d(1.0, "Weight of the summary score in the total.", lo=0)


@dataclass(frozen=True)
class RewardConfig:
    weights: ProcessWeights = d(ProcessWeights, "Weights of the process sub-scores.")
    mix: RewardMix = d(RewardMix, "Weights of the two streams in the total.")
    tool: Literal["hierr", "executed"] = d(
        "hierr", "Reward of the calls: HierR's process score, or 1 for a solved task and else 0 (reward.outcome).")
    outcome: Literal["judge", "all_gold", "all_gold_only", "process"] = d(
        "judge", "What counts as solved (toolpo, executed): the judge's verdict; every gold call made, or besides no "
        "other; a process score of 0.9.")
    checker_votes: int = d(3, "rltr: votes on whether the calls are complete.", lo=1)
    repeat_penalty: float = d(0.1, "rltr: taken off for each call that equals the one before it.", lo=0)
    error_penalty: float = d(0.2, "rltr: taken off for each well-formed call that the simulator refused.", lo=0)
    overlong_buffer: int | None = d(
        None, "Tokens before rollout.max_response_tokens over which rewards fall by up to 1 (DAPO); null: none.", lo=1)
    no_call_penalty: float = d(-0.5, "Total of a rollout that omits calls it needs.", hi=0)
    no_call_reply: Literal["zero", "judge"] = d(
        "zero", "Summary score of a reply where no call is due: zero (the paper's) or rated by the judge (ours).")
    parallel_rule: Literal["first_block", "first_turn"] = d(
        "first_block", "The parallel score counts the first block (the paper's) or turn (for chat.parallel blocks).")


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: Literal["slca", "grpo", "toolpo", "rltr", "gdpo", "mt_grpo"] = d(
        "slca", "slca: a stream each for calls and reply; grpo: one for all tokens; the others: slca/baselines.py.")
    lambda_tool: float = d(1.0, "slca: factor on the normalised tool stream.", lo=0)
    lambda_summary: float = d(1.0, "slca: factor on the normalised summary stream.", lo=0)
    routing: tuple[tuple[float, float], tuple[float, float]] = d(
        ((1.0, 0.0), (0.0, 1.0)), "slca: ((tool to tool, summary to tool), (tool to summary, summary to summary)).")
    summary_credit: Literal["all", "omissions"] = d(
        "all", "slca: whose summary tokens get their stream: all, or omitted calls alone (Table 16, second row).")
    turn_credit: bool = d(False, "slca: each call turn gets the part of the process score that it earned (ours).")
    abstention_credit: bool = d(
        False, "slca: where no call is due, all tokens get the normalised process score instead (ours).")
    divide_by_std: bool = d(True, "Divide the centred rewards of a group by their standard deviation.")
    eps: float = d(1e-6, "Added to that standard deviation.", above=0)
    reward_ratio: float = d(1.0, "grpo: total = ratio * process + summary.", above=0)
    segmenter: Literal["positional", "strict"] = d(
        "positional", "Which tokens are the summary: the last run (the paper's); strict: only if it opens no call.")


@dataclass(frozen=True)
class LossConfig:
    surrogate: Literal["token", "gspo", "cispo", "sapo"] = d(
        "token", "token: PPO's clipped ratio of a token; gspo: of a sequence; cispo: the ratio only weighs; sapo: a "
        "soft gate.")
    importance_cap: float | None = d(
        None, "Losses are weighed by the ratio of the learner's old to the sampler's probabilities, at most this much "
        "(truncated importance sampling); null: not.", above=0)
    clip_low: float = d(0.2, "The ratio is clipped below at 1 - clip_low.", lo=0, hi=1)
    clip_high: float = d(0.2, "The ratio is clipped above at 1 + clip_high.", lo=0)
    dual_clip: float = d(3.0, "Bound on the loss of negative advantages, in multiples of the advantage.", above=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_over_constant",
                         "segment_mean"] = d("token_mean", "How the token losses of an update become one number.")
    norm_length: int | None = d(
        None, "seq_sum_over_constant: the constant; null: the longest response of the update.", lo=1)
    segment_weights: tuple[float, float] = d((1.0, 1.0), "segment_mean: weights of (tool, summary).", lo=0)
    kl_coef: float = d(0.0, "Weight of the KL to the policy at the start of RL; 0 keeps no reference model.", lo=0)
    kl_kind: Literal["k1", "k2", "k3", "abs"] = d("k3", "Which KL estimator.")
    old_logprobs: Literal["recompute", "sampler"] = d(
        "recompute", "Old log-probabilities: a learner pass before the updates, or those stored while sampling.")


@dataclass(frozen=True)
class SFTConfig:
    target: Literal["all", "planner"] = d(
        "all", "planner (RLTR): the reply of a demonstration is replaced by the fixed end of planning.")
    enabled: bool = d(True, "Run supervised training before RL.")
    max_steps: int | None = d(1500, "End after this many optimiser steps at the latest; null: epochs decide.", lo=1)
    epochs: int | None = d(None, "End after this many passes over the rows at the latest; null: no limit.", lo=1)
    rows_per_step: int = d(16, "Demonstrations in one optimiser step, over all ranks.", lo=1)
    max_tokens: int = d(1024, "Demonstrations are cut off at this length.", lo=2)
    prompt_loss_weight: float = d(0.1, "Loss weight of prompt and tool tokens; 1 is plain text modelling.", **FRACTION)
    optimizer: Literal["muon", "adamw"] = d("muon", "muon: Muon for matrices, AdamW for the rest.")
    lr: float = d(0.01, "Peak learning rate (of the matrices, with muon).", above=0)
    adam_lr: float = d(3e-3, "muon: peak learning rate of embeddings, norms and biases.", above=0)
    weight_decay: float = d(0.01, "Decoupled weight decay.", lo=0)
    betas: tuple[float, float] = d((0.9, 0.999), "AdamW's decay rates.", lo=0, below=1)
    grad_clip: float = d(1.0, "Largest gradient norm of a step.", above=0)
    scheduler: Literal["gated", "cosine"] = d(
        "gated", "gated: constant until the copy gate opens, then linear decay; cosine: to zero at the last step.")
    warmup_steps: int = d(50, "gated: steps of linear warm-up.", lo=0)
    warmup_ratio: float = d(0.1, "cosine: share of the steps spent in linear warm-up.", **FRACTION)
    decay_steps: int = d(200, "gated: steps of the decay once the gate has opened.", lo=0)
    copy_gate: float = d(0.85, "gated: opens at this share of right argument values on held-out tasks.", **FRACTION)
    gate_every: int = d(100, "gated: steps between measurements of the gate.", lo=1)
    curriculum_fraction: float = d(0.35, "kind world: share of max_steps on easy copying rows first.", **FRACTION)


@dataclass(frozen=True)
class RLConfig:
    enabled: bool = d(True, "Run reinforcement learning, after SFT if that is on.")
    steps: int | None = d(100, "Number of RL steps; null: epochs decide.", lo=1)
    epochs: int = d(1, "Passes over the prompts where steps is null; a last step that is not full is left out.", lo=1)
    prompts_per_step: int = d(16, "Prompts sampled in one step, over all ranks.", lo=1)
    group_size: int = d(8, "Rollouts a prompt: the group that advantages are normalised over.", lo=2)
    dynamic_sampling: bool = d(
        False, "Groups without any signal are replaced by groups of further prompts, once a step (DAPO).")
    prompts_per_update: int = d(16, "Prompts behind one optimiser update; divides prompts_per_step.", lo=1)
    lr: float = d(2e-4, "Learning rate, constant after warm-up.", above=0)
    warmup_steps: int = d(10, "RL steps of linear warm-up.", lo=0)
    weight_decay: float = d(0.0, "Decoupled weight decay.", lo=0)
    betas: tuple[float, float] = d((0.9, 0.999), "AdamW's decay rates.", lo=0, below=1)
    grad_clip: float = d(1.0, "Largest gradient norm of an update.", above=0)

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // self.prompts_per_update

    @property
    def rollouts_per_update(self) -> int:
        return self.prompts_per_update * self.group_size

    def steps_per_epoch(self, prompts: int) -> int:
        """Full steps in one pass over that many prompts."""
        return prompts // self.prompts_per_step

    def planned_steps(self, prompts: int) -> int:
        """RL steps of the run, from steps or else from epochs over that many prompts."""
        return self.epochs * self.steps_per_epoch(prompts) if self.steps is None else self.steps


@dataclass(frozen=True)
class EvalConfig:
    every: int = d(20, "RL steps between validations; 0: never.", lo=0)
    max_prompt_tokens: int = d(4096, "Tasks with a longer prompt are left out of an evaluation and counted.", lo=1)
    max_response_tokens: int = d(320, "Tokens after the prompt in an evaluation rollout.", lo=1)
    summariser: str | None = d(
        None, "Folder of a frozen policy (same vocabulary) that writes the replies instead, as in RLTR; null: none.")
    success_threshold: float = d(0.9, "A rollout succeeds from this process score on.", **FRACTION)


@dataclass(frozen=True)
class LogConfig:
    stream_gradients: int = d(0, "RL steps between measurements of the two streams' gradients (two passes more); 0: "
                                 "never.", lo=0)
    keep_rollouts: int = d(1, "Best and worst rollouts of a step that are kept (as many of each); 0: none.", lo=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """What --resume goes on from inside a stage; the end of a stage is always kept."""

    sft_every: int = d(200, "SFT steps between checkpoints; 0: none.", lo=0)
    rl_every: int = d(10, "RL steps between checkpoints; 0: none.", lo=0)
    keep: int = d(2, "The last so many of each stage are kept.", lo=1)


@dataclass(frozen=True)
class Config:
    seed: int = d(0, "Seed of everything that is drawn in the run.", lo=0, hi=2**32 - 1)
    threads: int = d(0, "CPU threads a rank; 0: the cores divided by the local ranks.", lo=0)
    shard: bool = d(True, "Several ranks share the weights out (FSDP2); false: each holds all, for small models.")
    precision: Literal["fp32", "bf16"] = d(
        "fp32", "Compute type of the learner, SFT and RL alike; weights and optimiser state keep theirs.")
    micro_batch_tokens: int = d(
        8192, "Tokens of one forward and backward pass, the prompt of a group counted once; memory, not results.", lo=1)
    model: PolicyConfig = d(PolicyConfig, "The policy.")
    lora: LoRAConfig = d(LoRAConfig, "Adapters.")
    optim: OptimConfig = d(OptimConfig, "How the optimiser keeps its state.")
    data: DataConfig = d(DataConfig, "The tasks.")
    chat: ChatConfig = d(ChatConfig, "The dialogue form.")
    rollout: RolloutConfig = d(RolloutConfig, "Limits of a rollout.")
    simulator: SimulatorConfig = d(SimulatorConfig, "What answers calls.")
    judge: JudgeConfig = d(JudgeConfig, "What rates replies.")
    reward: RewardConfig = d(RewardConfig, "HierR.")
    advantage: AdvantageConfig = d(AdvantageConfig, "Credit assignment.")
    loss: LossConfig = d(LossConfig, "The policy loss.")
    sft: SFTConfig = d(SFTConfig, "Supervised training.")
    rl: RLConfig = d(RLConfig, "Reinforcement learning.")
    eval: EvalConfig = d(EvalConfig, "Validation and final tables.")
    checkpoint: CheckpointConfig = d(CheckpointConfig, "Checkpoints inside a stage.")
    log: LogConfig = d(LogConfig, "Records.")
