"""The judge of replies: one of the paper's five ratings, by rules or by a frozen language model.

It sees the question, the tool results and the reply, never the calls. Rules: coverage is the share of the asked facts
that the reply names; faithfulness the share of the values it states (numbers, names) that stand in a tool result or in
the conversation. The rating is their product on the five steps. A seeded noise can move it, to study an unreliable
judge. They cannot see clarity, which a model is asked for too; how often the two agree is counted.
Any other judge is an object with the same `rate`, and not trusted to give ratings: see `rated`.
"""
from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from slca.baselines import verdict, vote
from slca.llm import Writer
from slca.rewards import MIN_REPLY, RATINGS, WEIGHTS, parse_rating, score_turns, wants_judge, with_summary
from slca.sampler import row_stream
from slca.settings import JudgeConfig, RewardConfig
from slca.simulator import in_time, names

if TYPE_CHECKING:
    from slca.rollout import Episode

STEPS = list(RATINGS)  # very poor ... excellent
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|$)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w|\.\d)")
_WORD = re.compile(r"\w+(?:\.\d+)*")
_QUOTED = re.compile(r'": "([^"]{1,80})"')
MAX_QUOTED = 64  # strings of a result that are looked for in a reply, so that the time stays linear
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)(?<!\n)\b[A-Z][a-z]+\b")  # a capitalised word that opens no sentence


@dataclass
class Reply:
    """What a judge is shown: context is the conversation's own text, facts what a full answer names."""

    context: str
    results: Sequence[str]
    reply: str
    facts: Sequence[str] = ()


class RulesJudge:
    """noise: chance that a rating moves one step (up or down alike; at an end it stays)."""

    def __init__(self, noise: float = 0.0, seed: int = 0):
        self.noise, self.seed = noise, seed

    def rate(self, replies: Sequence[Reply]) -> list[float | None]:
        """One score in {0, .25, .5, .75, 1} a reply."""
        return [RATINGS[STEPS[self._step(r)]] for r in replies]

    def _step(self, r: Reply) -> int:
        step = rating_step(r)
        if self.noise:
            key = [self.seed, *(r.context + "\0" + r.reply).encode("utf-8", "surrogatepass")]
            chance, side = row_stream(*key).random(2)
            if chance < self.noise:
                step = min(4, max(0, step + (1 if side < 0.5 else -1)))
        return step


EXAMINER = """You rate the final reply of an assistant that used tools. You are given the conversation, the results of \
its tool calls and the reply. Judge whether the reply reads the results correctly, answers all that was asked, and is \
clear; a statement that neither the results nor the conversation support is wrong. Do not judge which tools were called.
Write exactly:
<response_quality>
<reasoning>one or two sentences</reasoning>
<rating>one of: very poor, poor, acceptable, good, excellent</rating>
</response_quality>"""


class LLMJudge:
    """A frozen model's ratings (paper Tables 3 and 4); `writer` counts what it was asked."""

    def __init__(self, writer: Writer):
        self.writer = writer

    def rate(self, replies: Sequence[Reply]) -> list[float | None]:
        """One score in {0, .25, .5, .75, 1} a reply; None: no answer, or none that can be read."""
        texts = self.writer.texts([examiner_chat(r) for r in replies])
        return [None if text is None else parse_rating(text) for text in texts]


def examiner_chat(r: Reply) -> list[dict]:
    results = "\n\n".join(f"[Tool Response {i}]\n{text.strip()}" for i, text in enumerate(r.results, 1))
    parts = (("Conversation", r.context), ("Tool results", results or "none"), ("Reply", r.reply))
    return [{"role": "system", "content": EXAMINER},
            {"role": "user", "content": "\n\n".join(f"# {name}\n{text}" for name, text in parts)}]


def make_judge(c: JudgeConfig, noise: float = 0.0) -> RulesJudge | LLMJudge:
    """The judge of a configuration; noise: of the rules. ValueError or OSError where its model cannot be used."""
    return RulesJudge(noise, c.seed) if c.kind == "rules" else LLMJudge(Writer(c.kind, c.llm, c.seed))


def rating_step(r: Reply) -> int:
    """0 (very poor) to 4 (excellent): coverage * faithfulness, to the nearest step, halves up."""
    reply = _CALL.sub(" ", r.reply).strip()
    if not reply:
        return 0
    return int(4 * coverage(reply, r) * faithfulness(reply, r) + 0.5)


def words(text: str) -> set[str]:
    return {w.lower() for w in _WORD.findall(text)}


def stated(text: str) -> set[str]:
    """Numbers and names in a text, in lower case. Each is one word."""
    return {v.lower() for v in _NUMBER.findall(text) + _NAME.findall(text)}


def coverage(reply: str, r: Reply) -> float:
    """Share of the asked facts in the reply; where none are known, of the results it quotes some value of.

    A result's values are its numbers and names, and in JSON its quoted strings.
    """
    if r.facts:
        return sum(names(reply, fact) for fact in r.facts) / len(r.facts)
    said = words(reply)
    values = [(stated(result), _QUOTED.findall(result)[:MAX_QUOTED]) for result in r.results]
    quoted = [bool(words_ & said) or any(names(reply, s) for s in strings) for words_, strings in values
              if words_ or strings]
    return sum(quoted) / len(quoted) if quoted else 1.0


def faithfulness(reply: str, r: Reply) -> float:
    """Share of the values stated in the reply that the conversation or a tool result holds; 1 where it states none."""
    values = stated(reply)
    return len(values & words("\n".join([r.context, *r.results]))) / len(values) if values else 1.0


def rated(judge, replies: Sequence[Reply], timeout_s: float) -> list[float | None]:
    """The judge's rating of each reply; None where it failed: it raised, hung, or gave no number in [0, 1].

    The rules and a frozen model, which mind their time, run right here. Another judge runs in a thread and has
    timeout_s for all. Where its answer to the batch is not one rating a reply, it is asked for each alone: one reply
    that breaks it costs the others nothing.
    """
    if isinstance(judge, RulesJudge | LLMJudge):
        return judge.rate(replies)
    end = time.monotonic() + timeout_s

    def ask(part: list[Reply]) -> list[float | None]:
        left = end - time.monotonic()
        found, error = in_time(lambda: judge.rate(part), left, "judge") if left > 0 else (None, "late")
        if error or not isinstance(found, list | tuple) or len(found) != len(part):
            return [None] if len(part) == 1 else [rating for reply in part for rating in ask([reply])]
        good = (isinstance(r, Real) and not isinstance(r, bool) and 0 <= r <= 1 for r in found)
        return [float(r) if ok else None for r, ok in zip(found, good, strict=True)]

    return ask(list(replies)) if replies else []


def score_episodes(episodes: Sequence[Episode], judge: RulesJudge | LLMJudge, cfg: RewardConfig,
                   failure_score: float = 0.0, timeout_s: float = 120.0) -> None:
    """Fill in every episode's rewards: the rules first, then one batch to the judge where its rating counts.

    A reply that the judge fails to rate gets failure_score and is counted on its episode. Where it does rate it, the
    episode notes whether the rules without noise give the same.
    """
    weights = {k: getattr(cfg.weights, k) for k in WEIGHTS}
    for e in episodes:
        e.rewards = score_turns(e.turns, e.task.allowed_tools, e.task.gold_calls, weights=weights,
                                parallel_rule=cfg.parallel_rule)
    asked = [e for e in episodes if wants_judge(e.rewards, cfg.no_call_reply)]
    replies = list(map(reply_of, asked))
    ratings = {id(e): r for e, r in zip(asked, rated(judge, replies, timeout_s), strict=True)}
    for e, rule in zip(asked, RulesJudge().rate(replies), strict=True):
        e.judge_agrees = None if ratings[id(e)] is None else ratings[id(e)] == rule
    for e in episodes:
        e.judge_failures = int(id(e) in ratings and ratings[id(e)] is None)
        score = failure_score if e.judge_failures else ratings.get(id(e))
        e.rewards = with_summary(e.rewards, score, (cfg.mix.process, cfg.mix.summary), cfg.no_call_penalty,
                                 cfg.no_call_reply)


def reply_of(e: Episode) -> Reply:
    """What a judge is shown of a scored episode."""
    return Reply("\n".join(str(m.get("content") or "") for m in e.task.messages),
                 [text for role, text in e.turns if role == "tool"], e.rewards.final_reply, e.task.facts)


# --- other questions to a judge, for the baselines --------------------------------------------------------------------

SOLVED = 0.75  # the rules, and a judge that only rates, call a task solved from "good" on: our guess
ASK_SOLVED = """You decide whether an assistant solved the user's task. You are given the conversation, the \
results of its tool calls and its final reply. Answer with one word: Solved, Unsolved or Unsure."""
ASK_AGAIN = "You were unsure. Decide now, with one word: Solved or Unsolved."
ASK_COMPLETE = """You check the tool calls of an assistant. Given the user's task and the calls with their results, \
are all the calls there that the task needs? Answer with one digit: 1 for complete, 0 for incomplete."""


def solved(episodes: Sequence[Episode], judge, timeout_s: float) -> list[float]:
    """ToolPO's outcome by the judge, 1 or 0 an episode (as in the authors' code).

    0 without a question where a due call was left out or the reply is under 10 characters. A model is asked for a
    verdict, once more where it is unsure; a first question without an answer is a 0.
    """
    asked = [e for e in episodes if not e.rewards.omission and len(e.rewards.final_reply) >= MIN_REPLY]
    replies = list(map(reply_of, asked))
    if isinstance(judge, LLMJudge):
        chats = [[{"role": "system", "content": ASK_SOLVED}, examiner_chat(r)[1]] for r in replies]
        first = judge.writer.texts(chats)
        found = [0.0 if text is None else verdict(text) for text in first]
        unsure = [i for i, v in enumerate(found) if v is None]
        again = judge.writer.texts([[*chats[i], {"role": "assistant", "content": first[i]},
                                     {"role": "user", "content": ASK_AGAIN}] for i in unsure])
        for i, text in zip(unsure, again, strict=True):
            found[i] = verdict(text) or 0.0
    else:
        found = [float(r is not None and r >= SOLVED) for r in rated(judge, replies, timeout_s)]
    verdicts = dict(zip(map(id, asked), found, strict=True))
    return [verdicts.get(id(e), 0.0) for e in episodes]


def checker_votes(judge, questions: Sequence[str], trajectories: Sequence[str], complete: Sequence[float],
                  n: int) -> list[list[float | None]]:
    """RLTR's n votes on each trajectory: 0, 1, or None where a vote cannot be read.

    A model votes at temperature 0.7. Without one the vote is `complete` (whether every gold call was made), turned over
    with the chance of the rules' noise.
    """
    if isinstance(judge, LLMJudge):
        chats = [[{"role": "system", "content": ASK_COMPLETE},
                  {"role": "user", "content": f"# Task\n{q}\n\n# Calls\n{t}"}]
                 for q, t in zip(questions, trajectories, strict=True)]
        rounds = [judge.writer.texts(chats, temperature=0.7, salt=f"vote {k}") for k in range(n)]
        return [[vote(texts[i]) for texts in rounds] for i in range(len(chats))]
    noise, seed = (judge.noise, judge.seed) if isinstance(judge, RulesJudge) else (0.0, 0)
    found = []
    for q, t, c in zip(questions, trajectories, complete, strict=True):
        chances = row_stream(seed, n, *(q + "\0" + t).encode("utf-8", "surrogatepass")).random(n)
        found.append([1 - c if chance < noise else c for chance in chances])
    return found
