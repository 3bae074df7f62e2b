"""HierR, the process reward of a tool-calling rollout, and the totals that training uses.

Text in, numbers out: find the call blocks, match them with the gold calls, score five aspects in [0, 1], add the
judge's rating of the final reply, or replace everything by the omission penalty. The judge itself is elsewhere
(`wants_judge` says whether its rating would count). Whatever a model writes is scored and never raises: what the
parser cannot read is a malformed block. All scans are linear in the text.
"""
from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

WEIGHTS = {"format": 0.10, "name": 0.25, "key": 0.15, "value": 0.20, "parallel": 0.30}  # paper Eq. 22
RATINGS = {"very poor": 0.0, "poor": 0.25, "acceptable": 0.5, "good": 0.75, "excellent": 1.0}
MIN_REPLY = 10  # characters; a shorter reply is not judged

_REASON = re.compile(r"<think(?:ing)?>"), re.compile(r"</think(?:ing)?>")
_CALL = re.compile("<tool_call>"), re.compile("</tool_call>")
_RESULT = re.compile("<tool_response>"), re.compile("</tool_response>")
_QUALITY = re.compile("<response_quality>", re.IGNORECASE), re.compile("</response_quality>", re.IGNORECASE)
_RATING = re.compile("<rating>", re.IGNORECASE), re.compile("</rating>", re.IGNORECASE)


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """What `parse_blocks` finds. A block is the list of its JSON elements (one object is a list of one), or None."""

    text: str  # without reasoning
    n_open: int
    n_close: int
    blocks: list[list | None]
    turns: list[int]  # for each block, how many tool results open before it: equal numbers are one turn


@dataclass(frozen=True)
class HierR:
    """The rewards of one rollout. `total` is what training uses; `reported` is it over the sum of the mix weights."""

    fmt: float = 0.0
    name: float = 0.0
    key: float = 0.0
    value: float = 0.0
    parallel: float = 0.0
    process: float = 0.0
    omission: bool = False
    final_reply: str = ""
    has_tool_response: bool = False
    summary: float = 0.0
    total: float = 0.0
    reported: float = 0.0
    error: str | None = None  # why everything is zero
    n_open: int = 0
    n_close: int = 0
    n_valid: int = 0
    blocks: tuple[list[Call], ...] = ()  # the valid ones, in order
    n_predicted: int = 0
    n_gold: int = 0
    n_gold_first_step: int = 0

    @property
    def gold_empty(self) -> bool:
        return self.n_gold == 0


# ---- text

def _spans(text: str, tags: tuple[re.Pattern, re.Pattern]) -> Iterator[tuple[int, int, int, int]]:
    """Non-greedy open..close pairs as (start, inner start, inner end, end). A lazy regex would be quadratic here."""
    at = 0
    while (first := tags[0].search(text, at)) and (last := tags[1].search(text, first.end())):
        yield first.start(), first.end(), last.start(), last.end()
        at = last.end()


def strip_reasoning(text: str) -> str:
    """text without its think / thinking spans; an unclosed opener or a lone closer removes nothing."""
    kept, at = [], 0
    for start, _, _, end in _spans(text, _REASON):
        kept.append(text[at:start])
        at = end
    return "".join(kept) + text[at:]


def _load(text: str) -> Any:
    """JSON, or None. Too deep nesting is a RecursionError, an integer of thousands of digits a ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_blocks(text: str) -> Parsed:
    """The one parser of call blocks: no check of names, arguments or allowed tools (see `valid_calls`)."""
    text = strip_reasoning(text)
    blocks, turns, at, turn = [], [], 0, 0
    for start, inner, close, end in _spans(text, _CALL):
        turn += text.count("<tool_response>", at, start)
        at = end
        value = _load(text[inner:close].strip())
        blocks.append([value] if isinstance(value, dict) else value if isinstance(value, list) else None)
        turns.append(turn)
    return Parsed(text, text.count("<tool_call>"), text.count("</tool_call>"), blocks, turns)


def valid_calls(block: list | None, allowed: set[str] | None = None) -> list[Call] | None:
    """The calls of a block, or None if one element is bad: not an object, no name (or not allowed), bad arguments."""
    calls = []
    for item in block if block is not None else [None]:
        if not isinstance(item, dict):
            return None
        name, arguments = item.get("name"), item.get("arguments") or item.get("parameters") or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        if allowed is not None and name not in allowed:
            return None
        calls.append(Call(name, arguments))
    return calls


def final_reply(text: str) -> str:
    """The reply of a whole rollout's text: what follows the last tool result, else the last call, else everything."""
    text = strip_reasoning(text)
    if (at := text.rfind("</tool_response>")) >= 0 and (tail := text[at + len("</tool_response>"):].strip()):
        return tail
    if (at := text.rfind("</tool_call>")) >= 0:
        tail = text[at + len("</tool_call>"):].strip()
        return "" if "<tool_response>" in tail or tail.startswith("<tool_call>") else tail
    return text.strip()


def number_results(results: Iterable[str]) -> str:
    """Tool results as the judge sees them: numbered, stripped, a blank line between."""
    return "\n\n".join(f"[Tool Response {i}]\n{text.strip()}" for i, text in enumerate(results, 1)).strip()


def tool_results_text(text: str) -> str:
    """The closed tool results of a rollout's raw text (reasoning included), numbered; "" without one."""
    return number_results(text[inner:close] for _, inner, close, _ in _spans(text, _RESULT))


def parse_rating(judge_reply: str | None) -> float | None:
    """The first rating inside a response_quality element as 0, .25, .5, .75 or 1; anything else is None."""
    opened = _QUALITY[0].search(judge_reply or "")
    rating = next(_spans(judge_reply[opened.end():], _RATING), None) if opened else None
    if rating is None or not _QUALITY[1].search(judge_reply, opened.end() + rating[3]):
        return None
    return RATINGS.get(judge_reply[opened.end() + rating[1]:opened.end() + rating[2]].strip().lower())


# ---- matching

def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def loosely_equal(predicted: Any, gold: Any) -> bool:
    """Equal up to how a model may write a value: case, blanks, 10 and "10.0", true and 1, the order of keys.

    The first rule that decides wins. What Python cannot print or encode (integers of thousands of digits, deep
    nesting) is not equal.
    """
    if predicted is None or gold is None:
        return predicted is gold
    try:
        left, right = str(predicted).strip().lower(), str(gold).strip().lower()
        if left == right:
            return True
        a, b = _number(predicted), _number(gold)
        if a is not None and b is not None and abs(a - b) < 1e-9:
            return True
        if {left, right} <= {"true", "false", "1", "0"}:
            return (left in ("true", "1")) == (right in ("true", "1"))
        if isinstance(predicted, (list, dict)) and isinstance(gold, (list, dict)):
            return json.dumps(predicted, sort_keys=True) == json.dumps(gold, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        pass
    return False


def gold_steps(gold_tool_calls: Any) -> list[list[Call]]:
    """Gold calls in any form the data may hold -> steps of calls.

    Nested, flat (one step), names only, or any of these as JSON text; the first element decides between nested and
    flat. What is no list counts as no gold at all. In a nested list empty mappings and empty steps are dropped.
    """
    gold = _load(gold_tool_calls) if isinstance(gold_tool_calls, str) else gold_tool_calls
    if not isinstance(gold, (list, tuple)) or not gold:
        return []
    nested = isinstance(gold[0], (list, tuple))
    steps = [step for step in gold if isinstance(step, (list, tuple))] if nested else [gold]
    calls = [[_gold_call(c) for c in step if isinstance(c, (str, Mapping)) and (c != {} or not nested)]
             for step in steps]
    return [step for step in calls if step]


def _gold_call(item: str | Mapping) -> Call:
    if isinstance(item, str):
        return Call(item, {})
    name, arguments = item.get("name"), item.get("arguments")
    if isinstance(arguments, str):
        arguments = _load(arguments)
    return Call("" if name is None else str(name), dict(arguments) if isinstance(arguments, Mapping) else {})


def _name_f1(predicted: list[Call], gold: list[Call]) -> float:
    """Multiset F1 of the tool names; two empty sides agree."""
    if not predicted and not gold:
        return 1.0
    common = Counter(c.name for c in predicted) & Counter(c.name for c in gold)
    return 2 * common.total() / (len(predicted) + len(gold))


def _key_value(predicted: list[Call], gold: list[Call]) -> tuple[float, float]:
    """Mean Jaccard of the keys and mean share of equal values over gold calls with arguments.

    Greedy in gold order, as the authors have it: each takes the best unused prediction of its name, the first on ties.
    """
    gold = [c for c in gold if c.arguments]
    if not gold:
        return 1.0, 1.0
    unused: dict[str, list[dict]] = {}
    for call in predicted:
        unused.setdefault(call.name, []).append(call.arguments)
    keys = values = 0.0
    for name, wanted in gold:
        best, best_at = (0.0, 0.0), None
        for at, given in enumerate(unused.get(name, [])):
            shared = given.keys() & wanted.keys()
            key = len(shared) / len(given.keys() | wanted.keys())
            value = sum(loosely_equal(given[k], wanted[k]) for k in shared) / len(wanted)
            if key + value > sum(best):
                best, best_at = (key, value), at
        if best_at is not None:
            del unused[name][best_at]
        keys, values = keys + best[0], values + best[1]
    return keys / len(gold), values / len(gold)


# ---- scores

def _score_rules(parsed: Parsed, reply: str, has_tool_response: bool, allowed_tools: Iterable | None,
                 gold_tool_calls: Any, weights: Mapping[str, float] | None, parallel_rule: str) -> HierR:
    """The scores that need no judge; summary and totals are left at 0 for `with_summary`."""
    weights = WEIGHTS if weights is None else weights
    if weights.keys() != WEIGHTS.keys():
        raise ValueError(f"weights must have the keys {sorted(WEIGHTS)}, got {sorted(weights)}")
    if parallel_rule not in ("first_block", "first_turn"):
        raise ValueError(f"unknown parallel_rule {parallel_rule!r}: use 'first_block' or 'first_turn'")
    steps = gold_steps(gold_tool_calls)
    gold = [call for step in steps for call in step]
    n_first = len(steps[0]) if steps else 0
    allowed = set() if allowed_tools is None else {str(tool) for tool in allowed_tools}
    calls = [valid_calls(block, allowed) for block in parsed.blocks]
    valid = [(turn, block) for turn, block in zip(parsed.turns, calls, strict=True) if block is not None]
    predicted = [call for _, block in valid for call in block]
    base = HierR(final_reply=reply, has_tool_response=has_tool_response, n_open=parsed.n_open, n_close=parsed.n_close,
                 n_valid=len(valid), blocks=tuple(block for _, block in valid), n_predicted=len(predicted),
                 n_gold=len(gold), n_gold_first_step=n_first)
    if not allowed:
        return replace(base, error="no allowed tools")
    if gold and parsed.n_open == 0:
        return replace(base, omission=True)
    fmt = len(valid) / max(parsed.n_open, parsed.n_close, 1)
    key, value = _key_value(predicted, gold)
    counted = valid[:1] if parallel_rule == "first_block" else [v for v in valid if v[0] == valid[0][0]]
    parallel = float(n_first == sum(len(block) for _, block in counted))
    scores = dict(fmt=fmt, name=_name_f1(predicted, gold), key=key, value=value, parallel=parallel)
    scored = replace(base, **scores)
    return replace(scored, process=process_score(scored, weights))


def process_score(scores: HierR, weights: Mapping[str, float] = WEIGHTS) -> float:
    """The process score from the sub-scores (paper Eq. 22): what is reported whatever weights training used."""
    return sum(w * getattr(scores, "fmt" if k == "format" else k) for k, w in weights.items())


def wants_judge(scores: HierR, no_call_reply: str = "zero") -> bool:
    """Whether a judge's rating of this rollout would count, so that no other is asked for.

    It counts after a tool result, for a reply of 10 characters or more. no_call_reply="judge" (ours; the paper's rule
    is "zero") also rates a reply without any call where the gold has none.
    """
    if no_call_reply not in ("zero", "judge"):
        raise ValueError(f"unknown no_call_reply {no_call_reply!r}: use 'zero' or 'judge'")
    abstained = no_call_reply == "judge" and scores.gold_empty and scores.n_open == 0
    return (scores.error is None and not scores.omission and len(scores.final_reply) >= MIN_REPLY
            and (scores.has_tool_response or abstained))


def with_summary(scores: HierR, summary_score: float | None, mix: tuple[float, float] = (1.0, 1.0),
                 no_call_penalty: float = -0.5, no_call_reply: str = "zero") -> HierR:
    """scores with the judge's rating (None: judge failed, 0) where it counts, and the totals.

    total = mix[0] * process + mix[1] * summary, or no_call_penalty for an omission: it replaces the score.
    """
    summary = float(summary_score or 0.0) if wants_judge(scores, no_call_reply) else 0.0
    total = float(no_call_penalty) if scores.omission else mix[0] * scores.process + mix[1] * summary
    reported = total / sum(mix) if sum(mix) else 0.0
    return replace(scores, summary=summary, total=total, reported=max(0.0, reported) if scores.omission else reported)


def score_completion(completion: str, allowed_tools: Iterable | None, gold_tool_calls: Any,
                     weights: Mapping[str, float] | None = None, summary_score: float | None = None,
                     no_call_penalty: float = -0.5, mix: tuple[float, float] = (1.0, 1.0),
                     parallel_rule: str = "first_block") -> HierR:
    """HierR of a rollout given as one text (assistant turns and tool results), as the authors score it.

    allowed_tools: names, compared after str; none or empty gives zeros. weights: the keys of WEIGHTS. Never raises on
    text; ValueError for unknown weights or parallel_rule. Training scores turns instead: `score_turns`.
    """
    completion = completion or ""
    has_result = next(_spans(completion, _RESULT), None) is not None
    scores = _score_rules(parse_blocks(completion), final_reply(completion), has_result, allowed_tools,
                          gold_tool_calls, weights, parallel_rule)
    return with_summary(scores, summary_score, mix, no_call_penalty)


def score_turns(turns: Sequence[tuple[str, str]], allowed_tools: Iterable | None, gold_tool_calls: Any,
                weights: Mapping[str, float] | None = None, summary_score: float | None = None,
                no_call_penalty: float = -0.5, mix: tuple[float, float] = (1.0, 1.0),
                parallel_rule: str = "first_block") -> HierR:
    """HierR of a rollout given as turns (role, text), role "assistant" or "tool": only what the model wrote is read.

    Each assistant turn is parsed on its own; a tag inside a tool result counts for nothing, and a tool response that an
    assistant turn forges is no response: has_tool_response means a tool turn after the first turn that opens a call.
    The reply is what the assistant wrote after the last tool turn, never a result's text. Otherwise as
    `score_completion` of the joined text. Raises ValueError for another role.
    """
    parts, since_result, n_results, called, has_result = [], [], 0, False, False
    for role, text in turns:
        if role == "tool":
            n_results, since_result = n_results + 1, []
            has_result = has_result or called
        elif role == "assistant":
            part = parse_blocks(text)
            parts.append(part._replace(turns=[n_results] * len(part.blocks)))
            since_result.append(text)
            called = called or part.n_open > 0
        else:
            raise ValueError(f"turn role must be 'assistant' or 'tool', got {role!r}")
    parsed = Parsed("", sum(p.n_open for p in parts), sum(p.n_close for p in parts),
                    [b for p in parts for b in p.blocks], [t for p in parts for t in p.turns])
    tail = "\n".join(strip_reasoning(text) for text in since_result).strip()
    reply = tail if n_results else final_reply(tail)
    scores = _score_rules(parsed, reply, has_result, allowed_tools, gold_tool_calls, weights, parallel_rule)
    return with_summary(scores, summary_score, mix, no_call_penalty)
