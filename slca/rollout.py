"""The multi-turn loop: the policy writes a turn, the simulator answers its calls, until it replies or meets a limit.

All running episodes take their turns together, so decoding stays batched and the calls of a round reach the simulator
at once. Everything about a token (id, mask, log-probability) is written down when the token comes to be; model text is
decoded to be read, never encoded again. The KV cache is kept across turns.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slca import chat, ranks
from slca.data.task import Task
from slca.memory import reserve, room, sampler_rows
from slca.model import Policy
from slca.phases import phases
from slca.products import bf16_runs
from slca.rewards import HierR, parse_blocks
from slca.sampler import Sampler, row_stream
from slca.segments import segment_labels
from slca.settings import Config
from slca.simulator import Simulator, error_text, is_error, is_failure
from slca.slots import Row

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass
class Episode:
    """One rollout. ids, labels, policy_mask and logprobs are aligned, prompt included; a turn is (role, text).

    labels: 0 ignored, 1 tool, 2 summary. policy_mask: 1 where the policy sampled the token. logprobs: of the sampled
    tokens, 0 elsewhere. status: answered | turn_limit | length_limit | tool_overflow | malformed.
    """

    task: Task
    group: int
    member: int
    ids: list[int]
    prompt_length: int
    policy_mask: list[int]
    logprobs: list[float]
    labels: list[int] = field(default_factory=list)
    open_call: list[int] = field(default_factory=list)  # 1 on the tokens of a turn that opens a call
    turns: list[tuple[str, str]] = field(default_factory=list)
    status: str = ""
    tool_turns: int = 0
    calls: int = 0  # answered by the simulator
    call_errors: int = 0  # error observations, for bad calls and malformed blocks, also where the episode then ends
    calls_cut: int = 0  # beyond the limit of a turn, not executed
    responder_failures: int = 0  # calls without an answer: it raised, hung or gave no text
    results_cut: int = 0  # results over the limit of characters
    results_forged: int = 0  # results that spell a control token; it stays text
    judge_failures: int = 0  # 1 where the judge did not rate the reply
    judge_agrees: bool | None = None  # with the rules, where it rated the reply
    rewards: HierR | None = None
    outcome: float | None = None  # R_succ, once it was asked for (`credit.outcomes`)

    @property
    def response_length(self) -> int:
        return len(self.ids) - self.prompt_length

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None, open_call: bool = False) -> None:
        """Tokens come to be: sampled ones with their log-probabilities, injected ones with None."""
        self.ids += ids
        self.policy_mask += [0 if logprobs is None else 1] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.open_call += [int(open_call)] * len(ids)

    def finish(self, status: str, rule: str) -> None:
        self.status = status
        mask, opened = (torch.tensor([row]) for row in (self.policy_mask, self.open_call))
        self.labels = segment_labels(mask, rule, opened.bool())[0].tolist()
        lengths = {len(self.ids), len(self.labels), len(self.policy_mask), len(self.logprobs)}
        assert len(lengths) == 1, f"per-token records of unequal length: {lengths}"


@dataclass
class Turn:
    """The calls of an assistant turn. answers: for each a text that is ready, or the (call,) to be answered."""

    answers: list[str | tuple]
    cut: int  # calls over the limit, left out
    malformed: bool


def read_turn(text: str, max_calls: int) -> Turn:
    """A block that is no JSON, or a tag without its partner, is malformed; it gets an error observation.

    An element that is no valid call gets the simulator's. No call at all: no answers.
    """
    parsed = parse_blocks(text)
    unreadable = error_text("a tool call must be JSON between <tool_call> and </tool_call>")
    answers: list[str | tuple] = []
    for block in parsed.blocks:
        answers += [unreadable] if block is None else [(element,) for element in block]
    unpaired = max(parsed.n_open, parsed.n_close) > len(parsed.blocks)
    return Turn(answers[:max_calls] + [unreadable] * unpaired, max(0, len(answers) - max_calls),
                unpaired or None in parsed.blocks)


def answer_turns(turns: Sequence[tuple[Turn, list[dict]]], simulator: Simulator) -> list[list[str]]:
    """The results of each (turn, tools); the calls of all turns reach the simulator together."""
    asked = [(a[0], tools) for turn, tools in turns for a in turn.answers if not isinstance(a, str)]
    found = iter(simulator.respond_all(asked))
    return [[a if isinstance(a, str) else next(found) for a in turn.answers] for turn, _ in turns]


def call_errors(results: Sequence[str]) -> int:
    """How many report a fault of the call; a failed responder's is none of the model's."""
    return sum(is_error(r) and not is_failure(r) for r in results)


def shorten(result: str, limit: int) -> str:
    """A result over `limit` characters keeps its two ends around a marker (method: first and last half)."""
    if len(result) <= limit:
        return result
    half = limit // 2
    return f"{result[:half]}...(truncated)...{result[len(result) - half:]}"


def rollout(policy: Policy, tokenizer, tasks: Sequence[Task], simulator: Simulator, cfg: Config, group_size: int,
            key: tuple[int, ...], temperature: float, max_response_tokens: int | None = None,
            prompts: Sequence[list[int]] | None = None, sampler: Sampler | None = None,
            numbers: Sequence[int] | None = None) -> list[Episode]:
    """`group_size` episodes a task, members of a group adjacent.

    key: (seed, step); with the task's number and the member's it fixes each row's random stream. numbers: of the tasks,
    over all ranks; None: their indices. prompts: the tasks' rendered ids where they are at hand. temperature 0 is
    greedy.
    """
    limit = cfg.rollout.max_response_tokens if max_response_tokens is None else max_response_tokens
    numbers = range(len(tasks)) if numbers is None else numbers
    prompts = prompts or [chat.render(t.messages, t.shown_tools, tokenizer, parallel=cfg.chat.parallel)
                          for t in tasks]
    if sampler is not None:
        with phases("pack weights"):
            sampler.refresh()
    sampler = sampler or make_sampler(policy, tokenizer, cfg, group_size, len(tasks),
                                      max(map(len, prompts), default=0) + limit, temperature)
    episodes: list[Episode] = []
    for g, (task, ids) in enumerate(zip(tasks, prompts, strict=True)):
        episodes += [Episode(task, numbers[g], m, list(ids), len(ids), [0] * len(ids), [0.0] * len(ids),
                             open_call=[0] * len(ids)) for m in range(group_size)]
    waiting, live = list(range(len(tasks))), {}
    while waiting or live:
        take = waiting[:room(sampler, group_size)]
        waiting = waiting[len(take):]
        if take:
            streams = [[row_stream(*key, numbers[g], m).random(limit, np.float32) for m in range(group_size)]
                       for g in take]
            for g, rows in zip(take, sampler.admit([prompts[g] for g in take], streams), strict=True):
                live |= {row: episodes[g * group_size + m] for m, row in enumerate(rows)}
        rows = list(live)
        # with prompts waiting, freed rows are refilled before the last row of this round has stopped
        leave = max(group_size, len(rows) // 2) if waiting else None
        feed: dict[Row, list[int]] = {}
        # a row the last round left in the middle of its turn has drawn tokens that its episode does not hold yet
        budgets = [limit - live[row].response_length - len(row.fresh.ids) for row in rows]
        ended = sampler.decode(rows, budgets, leave)
        turns = [_record_turn(row, live[row], tokenizer, cfg) for row in ended]
        with phases("simulator"):
            answers = answer_turns([(turn, live[row].task.tools) for row, turn in zip(ended, turns, strict=True)],
                                   simulator)
        for row, turn, results in zip(ended, turns, answers, strict=True):
            ids = _after_turn(row, live[row], turn, results, tokenizer, cfg, limit)
            if ids is None:
                del live[row]
                sampler.release([row])
            else:
                feed[row] = ids
        if feed:
            sampler.feed(list(feed), list(feed.values()))
    if not cfg.rollout.keep_copy:
        sampler.rest()
    return episodes


def make_sampler(policy: Policy, tokenizer, cfg: Config, group_size: int, groups: int, max_len: int,
                 temperature: float) -> Sampler:
    """Cache rows for all episodes, or as many whole groups as `rollout.max_rows` allows (at least one)."""
    slots = sampler_rows(cfg, group_size, groups, max_len, ranks.world(), policy.device.type)
    stops = (CALL_CLOSE,) if cfg.chat.parallel == "list" else ()
    bf16 = cfg.rollout.precision == "bf16" and bf16_runs(policy.device)
    sampler = Sampler(policy, slots, max_len, temperature, tokenizer.stop_ids, stops, tokenizer,
                      torch.bfloat16 if bf16 else None)
    response = min(max_len, cfg.rollout.max_response_tokens)
    reserve(sampler, group_size, groups, max_len - response, response)
    return sampler


def _record_turn(row: Row, episode: Episode, tokenizer, cfg: Config) -> Turn:
    """Write a sampled turn down; -> its calls, none where the turn was cut off."""
    text = tokenizer.decode(row.fresh.ids)
    for stop in (tokenizer.decode([i]) for i in tokenizer.stop_ids):
        text = text.removesuffix(stop)
    episode.append(row.fresh.ids, row.fresh.logprobs, CALL_OPEN in text)
    episode.turns.append(("assistant", text))
    return read_turn(text, cfg.rollout.max_calls_per_turn) if row.fresh.stopped else Turn([], 0, False)


def _after_turn(row: Row, episode: Episode, turn: Turn, results: list[str], tokenizer, cfg: Config,
                limit: int) -> list[int] | None:
    """Take the results of a turn; -> the ids to go on with (recorded too), or None where the episode ends."""
    rule, bounds = cfg.advantage.segmenter, cfg.rollout
    if not row.fresh.stopped:
        return episode.finish("length_limit", rule)
    episode.call_errors, episode.calls_cut = episode.call_errors + call_errors(results), episode.calls_cut + turn.cut
    episode.responder_failures += sum(map(is_failure, results))
    episode.results_cut += sum(len(r) > bounds.max_tool_chars for r in results)
    results = [shorten(r, bounds.max_tool_chars) for r in results]  # before anything reads a result of megabytes
    episode.results_forged += sum(any(token in r for token in tokenizer.control) for r in results)
    if not results or turn.malformed and bounds.malformed_call == "stop":
        return episode.finish("malformed" if turn.malformed else "answered", rule)
    assistant_turns = sum(role == "assistant" for role, _ in episode.turns)
    if assistant_turns >= bounds.max_assistant_turns or episode.tool_turns >= bounds.max_tool_turns:
        return episode.finish("turn_limit", rule)
    ids = chat.tool_turn(results, tokenizer, closed=row.fresh.ids[-1] == tokenizer.token_to_id(chat.END))
    if episode.response_length + len(ids) >= limit:  # the result is rolled back whole, the record ends on the call
        return episode.finish("tool_overflow", rule)
    episode.append(ids, None)
    episode.turns += [("tool", r) for r in results]
    episode.tool_turns, episode.calls = episode.tool_turns + 1, episode.calls + len(results)
    return ids
