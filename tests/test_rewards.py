"""HierR: the golden vectors, the worked examples W15, W16 and W29, scoring by turns (a result's text counts for
nothing), the two phases with the judge in between, and that no completion, however hostile, raises or takes long.
"""
import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from slca.rewards import (
    WEIGHTS,
    final_reply,
    gold_steps,
    loosely_equal,
    number_results,
    parse_blocks,
    parse_rating,
    score_completion,
    score_turns,
    tool_results_text,
    valid_calls,
    wants_judge,
    with_summary,
)


def load(name: str) -> list[dict]:
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def golden(name: str):
    return pytest.mark.parametrize("case", load(name), ids=lambda c: c["id"])


def near(want):
    return pytest.approx(want, rel=1e-5, abs=1e-5)


def call(name: str, **arguments) -> dict:
    return {"name": name, "arguments": arguments}


def block(*calls) -> str:
    """One call block: a single call as an object, several as a list."""
    return f"<tool_call>\n{json.dumps(calls[0] if len(calls) == 1 else calls)}\n</tool_call>"


def result(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def five(h) -> tuple:
    return h.fmt, h.name, h.key, h.value, h.parallel


# ---- golden vectors

@golden("reward_hierr")
def test_golden_hierr(case):
    i, want = case["input"], case["expected"]
    rating = parse_rating(i["judge_reply"])
    h = score_completion(i["completion"], i["allowed_tools"], i["gold_tool_calls"], i["process_weights"],
                         i["judge_failure_score"] if rating is None else rating, i["no_call_penalty"],
                         (i["mix_weights"]["process"], i["mix_weights"]["summary"]))
    assert {k: getattr(h, "fmt" if k == "format" else k) for k in want["subscores"]} == near(want["subscores"])
    assert [h.process, h.summary, h.total, h.reported] == near(
        [want["process_score"], want["summary_score"], want["total_reward"], want["reported_score"]])
    exact = {"omission": h.omission, "judge_consulted": wants_judge(h), "error": h.error, "final_reply": h.final_reply,
             "gold_call_count": h.n_gold, "gold_first_step_count": h.n_gold_first_step,
             "has_tool_response": h.has_tool_response}
    if want["error"] is not None:
        assert h.error is not None
        exact.pop("error")
    assert {k: v for k, v in exact.items() if k in want} == {k: want[k] for k in exact if k in want}
    d = max(h.n_open, h.n_close)
    parsed = {"open_tags": h.n_open, "close_tags": h.n_close, "denominator": d, "valid_blocks": h.n_valid,
              "format_fully_valid": h.n_valid == d, "blocks": [[c._asdict() for c in b] for b in h.blocks]}
    for field, value in want.get("parsed", {}).items():
        assert parsed[field] == value, field


@golden("reward_extraction")
def test_golden_extraction(case):
    text = case["input"]["completion"]
    assert final_reply(text) == case["expected"]["final_reply"]
    assert tool_results_text(text) == case["expected"]["tool_results_text"]


@golden("reward_loose_equality")
def test_golden_loose_equality(case):
    assert loosely_equal(case["input"]["predicted_value"], case["input"]["gold_value"]) is case["expected"]["equal"]


# ---- worked examples

SEARCH, AAPL, MSFT = call("search", q="x"), call("price", t="AAPL"), call("price", t="MSFT")
F2, F5 = call("f", a=1, b=2), call("f", a=1, b=5)
BOOK = call("book", city="Paris", nights=2, breakfast=True)
STEPS = [call("sin", x=1), call("cos", x=2), call("pow", b=2, e=3)]
WRONG = [call("tan", x=1), *STEPS[1:]]
A, B = call("a", x=1), call("b", x=1)


@pytest.mark.parametrize("text, gold, scores, process", [
    (block(SEARCH) + block(AAPL) + block(MSFT), [[AAPL, MSFT]], (1, .8, 1, 1, 0), .65),  # Figure 9 left
    (block(AAPL, MSFT), [[AAPL, MSFT]], (1, 1, 1, 1, 1), 1.0),  # Figure 9 right
    (block(MSFT, AAPL), [[AAPL, MSFT]], (1, 1, 1, 1, 1), 1.0),
    ("".join(map(block, WRONG)), [[c] for c in STEPS], (1, 2 / 3, 2 / 3, 2 / 3, 1), .8),
    ("".join(map(block, WRONG)), STEPS, (1, 2 / 3, 2 / 3, 2 / 3, 0), .5),  # flat gold is one step
    ("".join(map(block, STEPS)), [[c] for c in STEPS], (1, 1, 1, 1, 1), 1.0),
    ("".join(map(block, STEPS)), STEPS, (1, 1, 1, 1, 0), .7),
    (block(call("book", city=" paris ", nights="2.0", room="x")), [[BOOK]], (1, 1, .5, 2 / 3, 1), .858333),
    ("<tool_call>{broken</tool_call>" + block(A), [[A], [B]], (.5, 2 / 3, .5, .5, 1), .691667),
    (block(F2), [[F5, F2]], (1, 2 / 3, .5, .25, 0), 0.1 + .25 * 2 / 3 + .075 + .05),  # greedy, not optimal
    ("No tool is needed.", [], (0, 1, 1, 1, 1), .9),
    (block(A), [], (1, 0, 1, 1, 0), .45),
    ("<tool_call>" + json.dumps(A), [[A]], (0, 0, 0, 0, 0), 0),  # never closed: worthless, but no omission
    (block(A, call("unknown", x=1)), [[A]], (0, 0, 0, 0, 0), 0),  # one bad element spoils its block
    ("<tool_call>[]</tool_call>", [], (1, 1, 1, 1, 1), 1.0)])
def test_process_by_hand(text, gold, scores, process):
    """W15."""
    h = score_completion(text, ["search", "price", "sin", "cos", "pow", "tan", "book", "f", "a", "b"], gold)
    assert five(h) == near(scores) and h.process == near(process) and not h.omission


@pytest.mark.parametrize("weights, want", [
    ((.2, .2, .2, .2, .2), .76), ((.05, .2, .2, .35, .2), .76), ((.05, .4, .15, .15, .25), .67),
    ((.15, .3, .25, .3, 0), .94), ((0, 0, 0, 0, 0), 0)])
def test_weight_sweep(weights, want):
    text = block(SEARCH) + block(AAPL) + block(MSFT)
    h = score_completion(text, ["search", "price"], [[AAPL, MSFT]], dict(zip(WEIGHTS, weights, strict=True)))
    assert h.process == near(want)


def test_totals_and_omission():
    text = block(SEARCH) + block(AAPL) + block(MSFT) + result("189") + "AAPL is at 189 dollars."
    h = score_completion(text, ["search", "price"], [[AAPL, MSFT]], summary_score=1.0)
    assert (h.process, h.summary, h.total, h.reported) == near((.65, 1.0, 1.65, .825))
    assert score_completion(text, ["search", "price"], [[AAPL, MSFT]], None, 1.0, mix=(3, 1)).total == near(2.95)
    hidden = score_completion(f"<think>{block(A)}</thinking> The reply is here.", ["a"], [[A]], summary_score=1.0)
    assert hidden.omission and five(hidden) == (0,) * 5
    assert (hidden.process, hidden.summary, hidden.total, hidden.reported) == (0, 0, -.5, 0)
    assert score_completion("A reply.", ["a"], [[A]], no_call_penalty=-2.0, mix=(5, 1)).total == -2.0
    assert not score_completion(f"<think>{block(A)}", ["a"], [[A]]).omission  # an unclosed opener hides nothing
    for tools in (None, []):
        h = score_completion(text, tools, [[A]], summary_score=1.0)
        assert h.error and not h.omission and h.total == h.process == h.summary == 0
    assert score_completion(block(call("7", x=1)), [7], [[call("7", x=1)]]).process == 1.0  # compared after str


LOOSE = [  # W16, and what Python cannot print, cast or encode
    (10, "10", True), ("10.0", 10, True), ("True", 1, True), ("true", "1", True), (None, None, True),
    ("abc", " ABC ", True), (.1 + .2, .3, True), (0, False, True), ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
    ([1, 2], "[1, 2]", True), ("1_000", 1000, True), (None, "", False), ([2, 1], [1, 2], False), ("yes", True, False),
    (float("nan"), float("nan"), True), (float("inf"), 1, False), (10 ** 400, 10 ** 400, True),
    (10 ** 400, 1.0, False), (10 ** 6000, 10 ** 6000, False), ("9" * 6000, 10 ** 6000, False), ("\ud800", "x", False),
    ([10 ** 6000], [1], False), ({1: 2, "a": 3}, {"a": 3, 1: 2}, False)]


@pytest.mark.parametrize("case", range(len(LOOSE)))
def test_loose_equality_by_hand(case):
    a, b, want = LOOSE[case]
    assert loosely_equal(a, b) is want and loosely_equal(b, a) is want


@pytest.mark.parametrize("reply, want", [  # W29
    *[(f"<response_quality><rating>{name}</rating></response_quality>", r) for name, r in
      (("very poor", 0), ("poor", .25), ("acceptable", .5), ("good", .75), ("excellent", 1), ("fine", None))],
    ("x <RESPONSE_QUALITY>\nwhy\n<Rating>\n Very Poor\n</RATING>\n</response_quality>", 0.0),
    ("<response_quality><rating>good</rating></response_quality><response_quality><rating>poor</rating>"
     "</response_quality>", .75),
    ("<rating>good</rating>", None), ("<response_quality><rating>good</rating>", None), ("", None), (None, None)])
def test_parse_rating(reply, want):
    assert parse_rating(reply) == want


def test_parse_rating_is_linear():
    """The contract's regular expression itself is cubic here and would hang."""
    assert parse_rating("<response_quality>" + "<rating></rating>" * 50_000 + "<rating>" * 50_000) is None


@pytest.mark.parametrize("text, counts", [
    (block(A) + result("r") + "123456789", False), (block(A) + result("r") + "1234567890", True),  # 10 characters
    (block(A) + "A reply without any result.", False), (block(A) + result("") + "An empty result is one.", True),
    (block(A) + result("r"), False)])
def test_when_the_rating_counts(text, counts):
    h = score_completion(text, ["a"], [[A]], summary_score=.75)
    assert wants_judge(h) is counts and h.summary == .75 * counts and h.total == near(1 + .75 * counts)
    assert with_summary(score_completion(text, ["a"], [[A]]), .75) == h  # two phases give the same
    assert score_completion(text, ["a"], [[A]], summary_score=None).summary == 0


@pytest.mark.parametrize("gold, steps", [
    ([[A], [B]], [["a"], ["b"]]), ([A, B], [["a", "b"]]), (["a", ""], [["a", ""]]), ('[["a"], ["b"]]', [["a"], ["b"]]),
    (None, []), ("[", []), ("[" * 100_000, []), ({"name": "a"}, []), ([], []), ([[]], []), (7, []),
    ([[{}, 3, None], [A]], [["a"]]), ([{}, A], [["", "a"]]), ([A, [B], 3], [["a"]]), ([[A], "b", B], [["a"]]),
    ([[{"arguments": {"x": 1}}]], [[""]])])
def test_gold_forms(gold, steps):
    assert [[c.name for c in step] for step in gold_steps(gold)] == steps
    assert len(steps) or not score_completion("no call at all", ["a"], gold).omission


def test_gold_arguments():
    forms = [{"name": "a", "arguments": v} for v in ({"x": 1}, '{"x": 1}', "{bad", "null", 5, None)]
    forms.append({"name": "a", "parameters": {"x": 1}})  # gold is read from `arguments` only
    assert [c.arguments for c in gold_steps([forms])[0]] == [{"x": 1}, {"x": 1}, {}, {}, {}, {}, {}]


def test_parse_blocks_checks_no_tool():
    parsed = parse_blocks('<think><tool_call>1</tool_call></think><tool_call>{"no": 1}</tool_call><tool_call>[1, {}]'
                          '</tool_call><tool_call>"x"</tool_call><tool_call>{</tool_call></tool_call><tool_call>')
    assert parsed.blocks == [[{"no": 1}], [1, {}], None, None] and (parsed.n_open, parsed.n_close) == (5, 5)
    assert valid_calls([A]) == [("a", {"x": 1})] and valid_calls([]) == [] and valid_calls(None) is None
    assert valid_calls([A], {"b"}) is None and valid_calls([A, {"name": ""}]) is None


def test_first_turn_counts_all_blocks_of_the_turn():
    """The native form, several blocks in a turn, for which counting the first block only would be wrong."""
    text = block(AAPL) + "\n" + block(MSFT) + result("1") + result("2") + block(SEARCH) + result("3") + "A long reply."
    turns = [("assistant", block(AAPL) + "\n" + block(MSFT)), ("tool", "1"), ("tool", "2"),
             ("assistant", block(SEARCH)), ("tool", "3"), ("assistant", "A long reply.")]
    gold = [[AAPL, MSFT], [SEARCH]]
    for rule, want in (("first_block", 0), ("first_turn", 1)):
        assert score_completion(text, ["price", "search"], gold, parallel_rule=rule).parallel == want
        assert score_turns(turns, ["price", "search"], gold, parallel_rule=rule).parallel == want
    broken = "<tool_call>{</tool_call>" + block(AAPL) + block(MSFT)
    assert score_completion(broken, ["price"], [[AAPL, MSFT]], parallel_rule="first_turn").parallel == 1


# ---- scoring by turns

WORDS = ["Let me look.", "<think>plan</think>", block(A), block(B), block(A, B), "<tool_call>{oops</tool_call>",
         block(call("zzz")), "", "The answer is forty-two.", "<think>never closed"]


def test_turns_equal_the_joined_text():
    """Random rollouts whose results hold no tags: every field agrees with scoring the joined text."""
    rng = random.Random(0)
    for _ in range(500):
        turns = []
        for _ in range(rng.randint(0, 3)):
            turns.append(("assistant", "\n".join([*rng.choices(WORDS[:-1], k=rng.randint(0, 2)), block(A)])))
            turns += [("tool", rng.choice(["", "42", '{"a": [1]}']))] * rng.randint(1, 2)
        turns.append(("assistant", "\n".join(rng.choices(WORDS, k=rng.randint(0, 3)))))
        text = "\n".join(t if role == "assistant" else result(t) for role, t in turns)
        gold = rng.choice([[[A]], [[A], [B]], [[A, B]], [A, B], [], None])
        for rule in ("first_block", "first_turn"):
            options = dict(summary_score=.5, parallel_rule=rule)
            joined = score_completion(text, ["a", "b"], gold, **options)
            assert score_turns(turns, ["a", "b"], gold, **options) == joined


def test_only_what_the_model_wrote_counts():
    reply = ("assistant", "The answer is forty-two.")
    base = score_turns([("assistant", block(A)), ("tool", "42"), reply], ["a", "b"], [[A], [B]], summary_score=1.0)
    for text in (block(B), "</tool_call>", "<tool_call>", "<think>", "</think>", "</tool_response>", result(block(B))):
        turns = [("assistant", block(A)), ("tool", text), reply]
        assert score_turns(turns, ["a", "b"], [[A], [B]], summary_score=1.0) == base
    # A forged result is no result, alone or before a call that got none.
    for text in (result("42"), block(A) + result("42"), "<think>" + result("42") + "</think>"):
        h = score_turns([("assistant", text + "The answer is forty-two.")], ["a"], [[A]], summary_score=1.0)
        assert not h.has_tool_response and h.summary == 0
    # A tool turn before any call is none either; a call in a result does not avert the omission.
    h = score_turns([("tool", block(A)), reply], ["a"], [[A]], summary_score=1.0)
    assert not h.has_tool_response and h.omission
    # Turns are parsed apart: a call cannot be opened in one and closed in the next.
    halves = [("assistant", "<tool_call>" + json.dumps(A)), ("tool", "error"), ("assistant", "</tool_call>")]
    assert score_turns(halves, ["a"], [[A]]).n_valid == 0
    # A result is never taken for the reply.
    silent = score_turns([("assistant", "<tool_call>" + json.dumps(A)), ("tool", "A long result."), ("assistant", "")],
                         ["a"], [[A]], summary_score=1.0)
    assert silent.final_reply == "" and silent.summary == 0
    with pytest.raises(ValueError, match="role"):
        score_turns([("user", "hi")], ["a"], [])


def test_judged_abstention():
    """no_call_reply="judge" rates a reply where the gold is empty and no call was made, and nothing else."""
    abstains = score_turns([("assistant", "No tool is needed here.")], ["a"], [])
    needless = score_turns([("assistant", block(A) + "No tool is needed here.")], ["a"], [])
    omits = score_turns([("assistant", "No tool is needed here.")], ["a"], [[A]])
    short = score_turns([("assistant", "No tool.")], ["a"], [])
    for h, judged in ((abstains, True), (needless, False), (omits, False), (short, False)):
        assert not wants_judge(h) and wants_judge(h, "judge") is judged
        assert with_summary(h, 1.0).summary == 0 and with_summary(h, 1.0, no_call_reply="judge").summary == judged
    assert with_summary(abstains, 1.0, no_call_reply="judge").total == near(1.9)


def test_refuses():
    for options in (dict(weights={"fmt": 1.0}), dict(weights={**WEIGHTS, "extra": 0.0}), dict(parallel_rule="last")):
        with pytest.raises(ValueError):
            score_completion(block(A), ["a"], [[A]], **options)
    with pytest.raises(ValueError, match="no_call_reply"):
        wants_judge(score_completion(block(A), ["a"], [[A]]), "maybe")


# ---- hostile text

DEEP = "[" * 5000 + "]" * 5000
HOSTILE = [
    f'{{"name": "a", "arguments": {{"x": {DEEP}}}}}', DEEP, '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
    '{"name": "a", "arguments": {"x": NaN}}', '{"name": "a", "arguments": {"x": -Infinity}}',
    '{"name": "a", "arguments": {"x": 1e999}}', '{"name": "a", "arguments": {"x": ' + "9" * 4000 + "}}",
    '{"name": "a", "arguments": {"x": "\\ud800"}}', '{"name": "\\udfff"}', '{"name": ["a"]}', '{"name": {}}',
    '{"name": "a", "arguments": {"x": ' + "[" * 600 + "]" * 600 + "}}", '{"name": "a", "arguments": [[]]}', "\x00", "",
    '{"name": "a", "name": "b"}', "null", "[[[]]]", "\ud800", "{" * 3000, '"' * 999, "\u2028",
    "[" + "{}," * 500 + "{}]"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<thinking>",
        "</thinking>", "<tool_", "call>", "\n", " ", "The answer is forty-two."]
GOLD = [[[A], [B]], [call("a", x=10 ** 6000)], [call("a", x=float("nan"))], '[{"name": "a", "arguments": "{"}]', DEEP]


def test_hostile_completions_score_low_and_never_raise():
    rng = random.Random(1)
    good = [c["input"]["completion"] for c in load("reward_hierr")]
    pool = TAGS + [f"<tool_call>{h}</tool_call>" for h in HOSTILE] + [block(A, B)]
    for n in range(4000):
        pieces = rng.choices(pool, k=rng.randint(0, 9))
        if n % 2:
            text = rng.choice(good)
            at = rng.randrange(len(text) + 1)
            pieces.insert(rng.randrange(len(pieces) + 1), text[:at] if n % 4 == 1 else text[at:])
        text, gold = "".join(pieces), rng.choice(GOLD)
        for h in (score_completion(text, ["a", "b"], gold, summary_score=1.0),
                  score_turns([("assistant", text), ("tool", text), ("assistant", text[::2])], ["a", "b"], gold)):
            scores = [h.process, h.summary, *five(h), h.reported]
            assert all(math.isfinite(x) and -1e-9 <= x <= 1 + 1e-9 for x in scores) and -.5 <= h.total <= 2
        assert isinstance(tool_results_text(text), str)


def test_unreadable_block_is_malformed():
    for text in (HOSTILE[0], DEEP, HOSTILE[2], "\x00", "", "null", '{"name": ["a"]}', "\ud800"):
        h = score_completion(f"<tool_call>{text}</tool_call>", ["a"], [[A]])
        assert five(h) == (0,) * 5 and h.total == 0 and not h.omission and h.n_open == 1 and h.n_valid == 0


@pytest.mark.parametrize("unit", [
    "<think>", "<tool_call>", "<tool_response>", "</think>", "</tool_call>", "<think><tool_call>",
    "<tool_call></tool_call>", "<tool_call>{}</tool_call><tool_response>", "<tool_response></tool_response>",
    "<tool_call>[1]</tool_call><think>", "[", "\\", "<"])
def test_megabyte_of_tags_is_quick(unit):
    """Regular expressions with a lazy middle need hours on some of these; here each takes well under a second."""
    text = unit * (1_000_000 // len(unit))
    h = score_completion(text, ["a"], [[A]])
    tool_results_text(text)
    score_turns([("assistant", text), ("tool", text)], ["a"], [[A]])
    assert h.process == 0


def test_record_is_plain_data():
    h = score_completion(block(A), ["a"], [[A]])
    assert json.loads(json.dumps(asdict(h)))["name"] == 1.0 and number_results([" x\n", ""]) == (
        "[Tool Response 1]\nx\n\n[Tool Response 2]")
