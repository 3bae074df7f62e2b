"""The in-domain suite: dialogues of up to ten turns against the simulator, scored by HierR and the judge.

Greedy by default, as in the paper. The embedded world's held-out tasks and rows of the released Toucan records take
the same way. Tasks whose prompt is over the limit are left out and counted.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slca import chat, ranks
from slca.data.task import Task
from slca.evaluation.metrics import agreement, by_subset, means, over_ranks, sums
from slca.judge import make_judge, score_episodes
from slca.llm import frozen_policy
from slca.model import Policy
from slca.responders import make_simulator
from slca.rewards import gold_steps
from slca.rollout import CALL_OPEN, Episode, rollout
from slca.sampler import generate
from slca.segments import runs
from slca.settings import Config
from slca.simulator import Simulator

BATCH = 256  # tasks rolled out at a time
EVALUATION = 2**32  # marks evaluation in the key of a row's random stream, apart from every training step


class NoTaskLeft(ValueError):
    """Every prompt is over the limit."""


@dataclass
class Result:
    """metrics: the M of the run's summary, over all ranks; by_subset the same for each kind, of this rank; gold_turns:
    mean gold steps a task, to hold against tool_turns; episodes: this rank's; skipped: prompts over the limit;
    agreement: share of rated replies on which the judge agrees with the rules, None where it rated none."""

    metrics: dict[str, float]
    by_subset: dict[str, dict[str, float]]
    gold_turns: float
    episodes: list[Episode]
    skipped: int
    agreement: float | None


def write_replies(episodes: Sequence[Episode], folder: str, tokenizer, max_new_tokens: int,
                  max_rows: int = 128) -> None:
    """Replies of answered episodes, written anew (greedy) by the policy in the folder: it reads what stood before them.

    It only replies: what it writes from a call on is left out. ids and labels stay those of the policy that planned.
    ValueError: another vocabulary.
    """
    summariser, other = frozen_policy(str(Path(folder).resolve()))
    if other.size != tokenizer.size:
        raise ValueError(f"eval.summariser {folder}: {other.size} tokens in its vocabulary, {tokenizer.size} in the "
                         "policy's; they must be the same")
    answered = [e for e in episodes if e.status == "answered"]
    starts = [runs(torch.tensor(e.policy_mask))[-1][0] for e in answered]
    found = generate(summariser, [e.ids[:start] for e, start in zip(answered, starts, strict=True)], 1,
                     max_new_tokens, 0.0, tokenizer.stop_ids, tokenizer=tokenizer, max_rows=max_rows)
    for e, reply in zip(answered, found, strict=True):
        ids = reply.ids[:-1] if reply.ids[-1] in tokenizer.stop_ids else reply.ids
        e.turns[-1] = ("assistant", tokenizer.decode(ids).split(CALL_OPEN)[0])


def evaluate(policy: Policy, tokenizer, tasks: Sequence[Task], cfg: Config, temperature: float = 0.0,
             progress: Callable[[int], None] = lambda done: None, simulator: Simulator | None = None,
             judge=None) -> Result:
    """One rollout a task, each rank its share. progress is told how many tasks are done.

    simulator, judge: None makes those of the configuration, the judge without noise.

    Raises NoTaskLeft, a ValueError.
    """
    simulator = simulator or make_simulator(cfg.simulator)
    judge = judge or make_judge(cfg.judge)
    prompts = [chat.render(t.messages, t.shown_tools, tokenizer, parallel=cfg.chat.parallel) for t in tasks]
    kept = [i for i, ids in enumerate(prompts) if len(ids) <= cfg.eval.max_prompt_tokens]
    if not kept:
        raise NoTaskLeft(f"none of {len(tasks)} tasks has a prompt within {cfg.eval.max_prompt_tokens} tokens "
                         "(eval.max_prompt_tokens)")
    episodes: list[Episode] = []
    for start in range(0, len(kept), BATCH):
        part = kept[start:start + BATCH]
        mine = ranks.share(len(part))
        episodes += rollout(policy, tokenizer, [tasks[part[i]] for i in mine], simulator, cfg, 1,
                            (cfg.seed, EVALUATION, start), temperature, cfg.eval.max_response_tokens,
                            [prompts[part[i]] for i in mine], numbers=mine)
        progress(min(start + BATCH, len(kept)))
    if cfg.eval.summariser:
        write_replies(episodes, cfg.eval.summariser, tokenizer, cfg.eval.max_response_tokens, cfg.rollout.max_rows)
    score_episodes(episodes, judge, cfg.reward, cfg.judge.failure_score, cfg.judge.timeout_s)
    threshold = cfg.eval.success_threshold
    gold_turns = sum(len(gold_steps(tasks[i].gold_calls)) for i in kept) / len(kept)
    found = means(over_ranks(sums(episodes, threshold))) | {"n": len(kept)}
    same, rated = over_ranks(agreement(episodes))["judge_agreement"]
    agrees = same / rated if rated else None
    return Result(found, by_subset(episodes, threshold), gold_turns, episodes, len(tasks) - len(kept), agrees)
