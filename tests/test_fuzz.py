"""Proves: whatever a policy writes, it is read, scored, labelled and answered without an exception, in range, in time.

Completions are made from real ones by a seeded generator: cut off at every place, mutated, tags swapped, JSON and
control tokens of all kinds put in, or plain noise. 4,000 by default; 20,000 others with

    pytest -m slow tests/test_fuzz.py
"""
from __future__ import annotations

import json
import random
import re
import time
from collections import Counter

import pytest
import torch
from test_rollout import run_turn
from test_simulator import junk

from slca.chat import render_text
from slca.data.world import KINDS, World
from slca.judge import Reply, RulesJudge
from slca.rewards import Parsed, parse_blocks, score_completion, score_turns
from slca.segments import segment_labels
from slca.simulator import Simulator, is_error

TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<thinking>",
        "</thinking>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<response_quality>", "<rating>", "<TOOL_CALL>"]
TAG = re.compile("|".join(map(re.escape, TAGS)))
VALUES = ["NaN", "Infinity", "-Infinity", "1e999", "-0", "1E5", "9" * 400, "9" * 4400, "0.1e-999", "true", "null", "{}",
          "[]", '""', '"\\ud800"', '"\\u0000"', '"\\', "'x'", "01", "+1", ".5", "[" * 40, "[" * 40 + "]" * 40,
          '{"a":' * 40, '{"name": "x"}', '"{0.__class__}"', '"%s%n"', '"../../etc/passwd"', "__import__('os')"]
ODD = ["\0", "\x1b[2J", "\u202e", "\ufeff", "\ud83d", "\udfff", "🙂", "e\u0301", "ß", "İ", "\u2028", "\r", "\t", "{",
       "}", "[", "]", '"', "\\", ",", ":", "<", ">", "</", "|>", "assistant\n", "%", "{}", "{0}"]
LARGE = ["[" * 20_000, '{"a":' * 5_000, "[" * 20_000 + "]" * 20_000, "9" * 20_000, '"' + "x" * 50_000 + '"',
         "\\" * 20_000, "<tool_call>" * 2_000, "</tool_call>" * 2_000, "<think>" * 2_000, " " * 50_000,
         "<tool_call>{}</tool_call>" * 500]


def completions() -> list[tuple]:
    """Right ones of the embedded world, in both forms of calls -> (text, tools, gold calls, facts)."""
    found = []
    for i, kind in enumerate(KINDS * 4):
        task = World("train", 5).task(i, kind)
        both = [render_text(m, task.tools, None, False, ("list", "blocks")[i % 2])
                for m in (task.messages, task.messages + task.demonstration)]
        found.append((both[1][len(both[0]) + len("<|im_start|>assistant\n"):], task.tools, task.gold_calls, task.facts))
    return found


def mutated(text: str, rng: random.Random) -> str:
    """One change, of any kind."""
    a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    b = min(b, a + 60)
    kind = rng.randrange(11)
    if kind == 0:  # cut off
        return text[:a]
    if kind == 1:  # a stretch left out, twice, backwards, or moved to the end
        return text[:a] + rng.choice(["", text[a:b] * 2, text[a:b][::-1]]) + text[b:] + rng.choice(["", text[a:b]])
    if kind == 2:  # another tag in place of one
        tags = list(TAG.finditer(text))
        found = rng.choice(tags) if tags else None
        return text[:found.start()] + rng.choice([*TAGS, ""]) + text[found.end():] if found else text + rng.choice(TAGS)
    if kind == 3:  # two tags change places
        tags = TAG.split(text), TAG.findall(text)
        rng.shuffle(tags[1])
        return "".join(part for pair in zip(tags[0], [*tags[1], ""], strict=True) for part in pair)
    if kind == 4:
        return text[:a] + rng.choice(TAGS) + text[a:]
    if kind == 5:
        return text[:a] + rng.choice(ODD) * rng.choice([1, 1, 50]) + text[a:]
    if kind == 6:  # another value in place of one in the JSON
        values = list(re.finditer(r'(?<=: )("[^"]*"|\d+)', text))
        found = rng.choice(values) if values else None
        return text[:found.start()] + rng.choice(VALUES) + text[found.end():] if found else text + rng.choice(VALUES)
    if kind == 7:  # a call of anything
        body = json.dumps(junk(rng, 0, [None, 1, 1e300, float("inf"), "x", "\ud800", "{0}", [], {}, True]),
                          ensure_ascii=rng.random() < 0.5)
        return text[:a] + f"<tool_call>{body}</tool_call>" + text[a:]
    if kind == 8:  # bytes
        raw = bytearray(text.encode("utf-8", "surrogatepass"))
        for _ in range(rng.randint(1, 8) if raw else 0):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return raw.decode("utf-8", rng.choice(["replace", "surrogateescape", "ignore"]))
    if kind == 9:
        return rng.randbytes(rng.randrange(200)).decode(rng.choice(["latin-1", "utf-16-le"]), "replace") + text[a:]
    noise = rng.choice(LARGE) if rng.random() < 0.05 else "".join(rng.choices(TAGS + ODD + VALUES, k=5))
    return text[:a] + noise + text[a:]


def check(i: int, text: str, tools: list, gold: list, facts: list, rng: random.Random) -> Counter:
    """What holds for every text; -> what was met in it."""
    parsed = parse_blocks(text)
    assert isinstance(parsed, Parsed) and len(parsed.blocks) == len(parsed.turns) <= min(parsed.n_open, parsed.n_close)
    assert parsed.turns == sorted(parsed.turns) and all(b is None or isinstance(b, list) for b in parsed.blocks)

    simulator = Simulator(seed=i, use_schema=i % 5 > 0)
    results, errors, cut, malformed = run_turn(text, tools, simulator, 2)
    assert all(isinstance(r, str) and r for r in results) and len(results) <= 3 and cut >= 0
    assert errors == sum(map(is_error, results)) and (cut == 0 or len(results) >= 2)
    assert malformed == (None in parsed.blocks or max(parsed.n_open, parsed.n_close) > len(parsed.blocks))

    names = [tool["function"]["name"] for tool in tools]
    summary, rule = rng.choice([None, 0.0, 0.5, 1.0]), rng.choice(["first_block", "first_turn"])
    turns = [("assistant", text), *(("tool", r) for r in results), ("assistant", text[:80])][:rng.randint(1, 9)]
    for scores in (score_turns(turns, names, gold, summary_score=summary, parallel_rule=rule),
                   score_completion(text, names, gold, summary_score=summary, parallel_rule=rule)):
        parts = scores.fmt, scores.name, scores.key, scores.value, scores.parallel, scores.summary, scores.reported
        assert all(type(p) is float and 0 <= p <= 1 for p in parts), scores
        assert -1e-9 <= scores.process <= 1 + 1e-9 and -0.5 <= scores.total <= 2 + 1e-9, scores
        assert isinstance(scores.final_reply, str) and scores.n_valid <= max(scores.n_open, scores.n_close)
    rating, = RulesJudge(0.5 * (i % 20 == 0), i).rate([Reply(text, results, scores.final_reply, facts)])
    assert rating in (0, 0.25, 0.5, 0.75, 1)

    mask, opened = "", []  # a letter a token: what stands between tool_response tags is not the policy's
    for k, part in enumerate(re.split("<tool_response>|</tool_response>", text[:400])):
        mask += "01"[k % 2 == 0] * len(part)
        opened += ["<tool_call>" in part] * len(part)
    last = max(((m.start(), m.end()) for m in re.finditer("1+", mask)), default=(0, 0))
    strict = i % 2 == 1
    labels, = segment_labels(torch.tensor([list(map(int, mask))]), "strict" if strict else "positional",
                             torch.tensor([opened], dtype=torch.bool)).tolist()
    own = 1 if strict and any(opened[slice(*last)]) else 2
    assert labels == [0 if m == "0" else own if t >= last[0] else 1 for t, m in enumerate(mask)]
    return Counter(valid=scores.n_valid > 0, malformed=malformed, error=errors > 0, answer=len(results) > errors,
                   cut=cut > 0, omission=scores.omission, process=scores.process > 0.95, rated=rating == 1,
                   reply=scores.summary > 0, two_runs={1, 2} <= set(labels))


def texts(n: int, seed: int):
    """(text, tools, gold, facts): first completions cut off at every place, then mutated ones."""
    rng, bases, made = random.Random(seed), completions(), 0
    for base in bases[seed % 2::2]:
        for at in range(len(base[0]) + 1):
            if made < n // 3:
                made += 1
                yield base[0][:at], *base[1:]
    for _ in range(n - made):
        base = rng.choice(bases)
        text = base[0]
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            text = mutated(text, rng)
        yield text, *base[1:]


@pytest.mark.parametrize("n, seed", [(4000, 0), pytest.param(20_000, 1, marks=pytest.mark.slow)])
def test_any_completion(n, seed):
    met, rng, start = Counter(), random.Random(seed), time.process_time()
    for i, (text, *task) in enumerate(texts(n, seed)):
        try:
            met += check(i, text, *task, rng)
        except Exception as error:
            raise AssertionError(f"text {i}, {len(text)} letters: {ascii(text[:2000])}") from error
    assert i + 1 == n and time.process_time() - start < n * 0.003  # 20,000 in a minute of one core
    assert all(met[kind] > n / 100 for kind in ("valid", "malformed", "error", "answer", "omission", "process", "rated",
                                                "reply", "two_runs")) and met["cut"] > n / 400, met
