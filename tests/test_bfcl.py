"""Proves: BFCL's gold passes our path and wrong answers do not; nothing a model writes is evaluated; runs resume.

Gold answers go the way of a model's: written as <tool_call> blocks, read by our parser, saved, read again, checked. The
tools shown and the score files are held against the benchmark's own code. The pooled overall reproduces Table 17.
"""
from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import inspect
import json
import shutil
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import pytest

from slca.agent import PromptTooLong, Reply, read_reply
from slca.config import FOREIGN, load_config
from slca.data.vocabulary import world_tokenizer
from slca.evaluation import bfcl, bfcl_checks
from slca.evaluation.bfcl import claim, finished, groups, pooled, result_file, run, suite, table
from slca.evaluation.bfcl_checks import (
    LIVE,
    MODEL,
    MULTI_TURN,
    NON_LIVE,
    OTHERS,
    PAPER,
    gold_call,
    language_of,
    open_benchmark,
    shown_tools,
)
from slca.model import ModelConfig, new_policy
from slca.weights import load_policy, save_policy

installed = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None or
                               importlib.util.find_spec("mpmath") is None,
                               reason="needs bfcl-eval 2025.6.16 (without its dependencies) and mpmath")
CFG = load_config([], list(FOREIGN))
ATTACKS = ["__import__('os').system('touch {}')", "open('{}', 'w')", "eval(\"open('{}', 'w')\")"]


@pytest.fixture(scope="module")
def bench():
    return open_benchmark()


def turn_text(calls, content: str = "") -> str:
    return content + "\n".join(f"<tool_call>\n{json.dumps(c)}\n</tool_call>" for c in calls)


class Scripted:
    """Stands for an Agent: `script(messages, tools)` gives the text of the next turn."""

    def __init__(self, script):
        self.script, self.asked, self.lock = script, [], threading.Lock()

    def reply(self, messages, tools, *, temperature, max_tokens, cancelled):
        assert temperature == 0 and max_tokens == 8192 and not cancelled.is_set()
        with self.lock:
            self.asked.append((list(messages), list(tools)))
            text = self.script(messages, tools)
        return Reply(text, *read_reply(text), [1, 2, 3], [0.0] * 3, True, 100, 0)


# --- figures of the paper, files -------------------------------------------------------------------------------------

def test_the_overall_of_table_17_is_pooled():
    """GRPO, SFT, RLTR and ToolPO of the 3B rows; an unweighted mean of the three would be .526 for GRPO."""
    assert (sum(NON_LIVE.values()), sum(LIVE.values()), sum(MULTI_TURN.values())) == (1150, 1351, 600)
    assert sum(PAPER.values()) == 3101 and len(PAPER) == 13 and not PAPER.keys() & OTHERS.keys()
    assert round(pooled([(.8583, 1150), (.6936, 1351), (.0600, 600)]), 4) == .6321
    assert pooled([(.5, 2), (1.0, 6)]) == .875


def counts(n: int, correct: int, lenient: int | None = 0) -> dict:
    return {"accuracy": correct / n, "correct": correct, "n": n, "lenient_correct": lenient, "too_long": 0,
            "malformed": 1, "cut": 0}


def test_groups_by_hand():
    """10/20 and 3/4: 13/24 non-live, not (.5 + .75) / 2; relevance and long context in no group."""
    scores = {"simple": counts(20, 10, 12), "multiple": counts(4, 3, 4), "multi_turn_base": counts(8, 1, None),
              "irrelevance": counts(50, 50), "multi_turn_long_context": counts(50, 50, None)}
    found = groups(scores)
    assert list(found) == ["AST Non-Live", "Multi-Turn", "Overall"]
    assert found["AST Non-Live"] == {"accuracy": pytest.approx(13 / 24), "correct": 13, "n": 24, "lenient_correct": 16,
                                     "whole": False}
    assert found["Overall"]["accuracy"] == pytest.approx(14 / 32) and found["Overall"]["lenient_correct"] is None
    text = table({"subsets": scores, "groups": found})
    assert "pooled over what was run, of 3101" in text and "0.5417   0.6667     24" in text
    whole = groups({s: counts(n, n, n) for s, n in PAPER.items()})
    assert whole["Overall"] == {"accuracy": 1.0, "correct": 3101, "n": 3101, "lenient_correct": 3101, "whole": True}


def test_a_half_last_line_is_dropped_and_a_bad_one_named(tmp_path):
    path = tmp_path / "r.json"
    assert finished(path) == {}
    path.write_text('{"id": "a_0", "result": []}\n{"id": "a_1", "resu')
    assert list(finished(path)) == ["a_0"] and path.read_text() == '{"id": "a_0", "result": []}\n'
    path.write_text('{"id": "a_0", "result": []}\n{"id": "a_1"}\n')
    with pytest.raises(ValueError, match=r"r\.json: line 2: expected an object with id and result"):
        finished(path)


def test_a_folder_belongs_to_one_setting(tmp_path):
    claim(tmp_path, {"checkpoint_sha256": "a", "max_tokens": 1})
    claim(tmp_path, {"checkpoint_sha256": "a", "max_tokens": 1})
    with pytest.raises(ValueError, match="another run, different in checkpoint_sha256; name another folder"):
        claim(tmp_path, {"checkpoint_sha256": "b", "max_tokens": 1})
    (tmp_path / "setting.json").unlink()
    (tmp_path / "result").mkdir()
    with pytest.raises(ValueError, match="no setting.json"):
        claim(tmp_path, {"checkpoint_sha256": "a"})
    (tmp_path / "setting.json").write_text("[")
    with pytest.raises(ValueError, match="expected the setting of a bfcl run"):
        claim(tmp_path, {})


def test_a_package_that_is_missing_or_another(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no data/BFCL_v3_simple\.json; expected the folder bfcl_eval"):
        open_benchmark(tmp_path)
    monkeypatch.setattr(bfcl_checks.importlib.machinery.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps bfcl-eval==2025\.6\.16 && pip install mpmath"):
        open_benchmark()


# --- tools as shown --------------------------------------------------------------------------------------------------

def test_schemas_by_hand():
    """Every depth: a list of dicts that hold a float, a tuple, any."""
    points = {"type": "array", "items": {"type": "dict", "properties": {"x": {"type": "float", "description": "X."}}}}
    function = {"name": "geo.find", "description": "Find.", "parameters": {
        "type": "dict", "required": ["at"], "properties": {
            "at": {"type": "tuple", "items": {"type": "float"}}, "points": points, "what": {"type": "any"}}}}
    (tool,) = shown_tools([function], "Python")
    at = {"type": "array", "items": {"type": "number"}}
    x = {"type": "number", "description": "X. This is a float type value.", "format": "float"}
    assert tool == {"type": "function", "function": {
        "name": "geo_find", "description": "Find. Note that the provided function is in Python 3 syntax.",
        "parameters": {"type": "object", "required": ["at"], "properties": {
            "at": at, "points": {"type": "array", "items": {"type": "object", "properties": {"x": x}}},
            "what": {"type": "string"}}}}}
    assert function["name"] == "geo.find" and function["parameters"]["type"] == "dict"  # the row is left alone


def test_java_and_javascript_take_text_in_their_syntax():
    function = {"name": "A.b", "description": "B.", "parameters": {"type": "dict", "properties": {
        "list": {"type": "ArrayList", "description": "L.", "items": {"type": "long"}}, "on": {"type": "boolean"}}}}
    (tool,) = shown_tools([function], "Java")
    assert tool["function"]["parameters"] == {"type": "object", "properties": {
        "list": {"type": "string", "description": "L. This is Java ArrayList type parameter in string representation. "
                 "The list elements are of type long; they are not in string representation."},
        "on": {"type": "string", "description": " This is Java boolean type parameter in string representation."}}}


def types_in(node) -> set:
    own = {node["type"]} if isinstance(node, dict) and isinstance(node.get("type"), str) else set()
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return own.union(*map(types_in, parts))


@installed
def test_tools_are_the_benchmarks_own(bench, monkeypatch):
    """Same JSON text as its own conversion for a native-call model; in multi-turn but for what a tool returns."""
    for name, attributes in {"tenacity": ("retry", "retry_if_exception_message", "retry_if_exception_type",
                                          "wait_random_exponential"),
                             "bfcl_eval.model_handler.parser.java_parser": ("parse_java_function_call",),
                             "bfcl_eval.model_handler.parser.js_parser": ("parse_javascript_function_call",)}.items():
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, lambda *a, **k: (lambda f: f))
        monkeypatch.setitem(sys.modules, name, module)
    theirs = importlib.import_module("bfcl_eval.model_handler.utils")
    mapping = importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    style = importlib.import_module("bfcl_eval.model_handler.model_style").ModelStyle.OpenAI
    seen: Counter = Counter()
    for subset in PAPER | OTHERS:
        entries = bench.entries(subset)
        assert len(entries) == (PAPER | OTHERS)[subset] == len({e["id"] for e in entries})
        for entry in entries[:60]:
            ours = shown_tools(entry["function"], language_of(subset))
            own = theirs.convert_to_tool(theirs.func_doc_language_specific_pre_processing(entry["function"], subset),
                                         mapping, style)
            returns = [(a["function"].pop("response", None), b["function"].pop("response", None))
                       for a, b in zip(ours, own, strict=True)]
            assert json.dumps(ours) == json.dumps(own)
            assert all(bool(a) == bool(b) for a, b in returns)
            seen.update(types_in([a for a, _ in returns]) | types_in(ours))
    assert seen.keys() == {"function", "object", "array", "string", "number", "integer", "boolean"}


# --- gold and wrong answers ------------------------------------------------------------------------------------------

def plain(value):
    """A possible answer, whose dicts hold lists of possible values, as one value."""
    if isinstance(value, dict):
        return {k: plain(next(x for x in v if x != "")) if isinstance(v, list) else v
                for k, v in value.items() if v != [""]}
    return [plain(x) for x in value] if isinstance(value, list) else value


def source(value, kind: str, language: str):
    """The value as the language writes it."""
    if language == "Python":
        return value
    if kind in ("ArrayList", "Array") and isinstance(value, list):
        inside = ", ".join(x if isinstance(x, str) and kind == "Array" else json.dumps(x) for x in value)
        return f"new ArrayList<>(Arrays.asList({inside}))" if kind == "ArrayList" else f"new String[]{{{inside}}}"
    if kind == "HashMap" and isinstance(value, dict):
        puts = "".join(f"put({json.dumps(k)}, {json.dumps(v)}); " for k, v in value.items())
        return f"new HashMap<>() {{{{ {puts}}}}}"
    if isinstance(value, str):
        return value
    return json.dumps(value) + {"long": "L", "Bigint": "n"}.get(kind, "")


def gold_calls(entry: dict, language: str = "Python") -> list[dict]:
    """Calls of the first possible answers; what may be left out is left out."""
    calls = []
    for answer in entry["ground_truth"]:
        (name, options), = answer.items()
        found = next((f for f in entry["function"] if f["name"] == name), entry["function"][0])
        known, needed = found["parameters"]["properties"], found["parameters"]["required"]
        arguments = {k: source(plain(next((x for x in v if x != ""), "")), known.get(k, {}).get("type"), language)
                     for k, v in options.items() if v and ("" not in v or k in needed)}
        calls.append({"name": name.replace(".", "_"), "arguments": arguments})
    return calls


def gold_dialogue(bench, entry: dict) -> list[list[dict]]:
    """Calls of each turn, positional arguments named."""
    order = {name: inspect.signature(method).parameters for name, method in bench.tool_objects(entry).methods.items()}
    return [[{"name": name, "arguments": dict(zip(order[name], values, strict=False)) | named}
             for name, values, named in map(gold_call, turn)] for turn in entry["ground_truth"]]


def score_lines(out: Path, subset: str) -> list[dict]:
    path = out / "score" / MODEL / f"BFCL_v3_{subset}_score.json"
    return [json.loads(line) for line in path.read_text().split("\n")]


def player(entries, answers):
    """A script that knows the question: the texts of the item's turns in order, one a user message, then no call."""
    known = {}
    for entry in entries:
        first = json.dumps(entry["question"][0][-1]["content"])
        known.setdefault(first, []).append(answers(entry))

    def script(messages, tools):
        if messages[-1]["role"] == "tool":
            return "Done."
        first = json.dumps(next(m for m in messages if m["role"] == "user")["content"])
        return known[first][0][sum(m["role"] == "user" for m in messages) - 1]
    return script


@installed
def test_gold_of_single_turns_through_the_whole_path(bench, tmp_path):
    """799 of 800 of simple, multiple and parallel: the answer to simple_363 calls a function that is not there."""
    failed = {}
    for subset in [*NON_LIVE, *LIVE]:
        entries = bench.entries(subset)
        texts = {e["id"]: turn_text(gold_calls(e, language_of(subset))) for e in entries}
        rows = {}
        for entry in entries:
            agent = Scripted(lambda messages, tools, text=texts[entry["id"]]: text)
            rows[entry["id"]] = json.loads(json.dumps(bfcl.run_item(agent, bench, subset, entry, threading.Event())))
        found = bfcl.score_subset(bench, subset, entries, rows, tmp_path)
        assert found["correct"] == found["lenient_correct"] and found["n"] == len(entries) and not found["malformed"]
        lines = score_lines(tmp_path, subset)
        assert lines[0] == {"accuracy": found["correct"] / len(entries), "correct_count": found["correct"],
                            "total_count": len(entries)}
        failed[subset] = [x["id"] for x in lines[1:]]
    assert failed["simple"] == ["simple_363"] and not failed["multiple"] and not failed["parallel"]
    assert not failed["parallel_multiple"] and not failed["live_parallel"] and not failed["live_parallel_multiple"]
    assert failed["live_simple"] == ["live_simple_106-63-0", "live_simple_112-68-0"]  # empty lists of values
    assert failed["live_multiple"] == ["live_multiple_862-181-3", "live_multiple_964-207-0"]
    assert failed["javascript"] == ["javascript_41"]  # another function's name, as in simple_363
    assert len(failed["java"]) <= 8  # escapes and element types that its converter cannot read back


@installed
def test_wrong_values_missing_calls_and_json_in_java_are_rejected(bench):
    entries = bench.entries("parallel")[:40]
    for entry in entries:
        calls = gold_calls(entry)
        assert bench.check_calls("parallel", entry, calls[::-1])["valid"]  # order is free
        assert bench.check_calls("parallel", entry, calls[:-1])["error_type"].endswith("wrong_count")
        assert not bench.check_calls("parallel", entry, [])["valid"]
        renamed = [{"name": "f", "arguments": calls[0]["arguments"]}, *calls[1:]]
        assert not bench.check_calls("parallel", entry, renamed)["valid"]
        key = next(iter(calls[0]["arguments"]))
        for wrong in ({key: "nonsense"}, {key: None}, {key: {"a": [1]}}, {"unknown": 1}):
            assert not bench.check_calls("parallel", entry, [
                {"name": calls[0]["name"], "arguments": calls[0]["arguments"] | wrong}, *calls[1:]])["valid"]
    java = next(e for e in bench.entries("java") if "true" in json.dumps(gold_calls(e, "Java")))
    calls = gold_calls(java, "Java")
    assert bench.check_calls("java", java, calls)["valid"]
    key = next(k for k, v in calls[0]["arguments"].items() if v == "true")
    calls[0]["arguments"][key] = True
    assert bench.check_calls("java", java, calls)["error_type"] == "type_error:java"


@installed
def test_a_value_that_the_checker_trips_over_is_wrong(bench):
    """An integer that no float can hold raises OverflowError in the benchmark's checker."""
    entry = next(e for e in bench.entries("simple") if any(
        p["type"] == "float" for p in e["function"][0]["parameters"]["properties"].values()))
    calls = gold_calls(entry)
    key = next(k for k, p in entry["function"][0]["parameters"]["properties"].items() if p["type"] == "float")
    calls[0]["arguments"][key] = 10**400
    assert bench.check_calls("simple", entry, calls)["error_type"] == "ast_checker:failed"


@installed
def test_relevance_asks_for_a_call_or_for_none(bench):
    call = [{"name": "f", "arguments": {}}]
    assert bench.check_calls("irrelevance", {}, [])["valid"] and not bench.check_calls("irrelevance", {}, call)["valid"]
    assert bench.check_calls("live_relevance", {}, call)["valid"]
    assert not bench.check_calls("live_relevance", {}, [])["valid"]
    assert not bench.check_calls("live_irrelevance", {}, call)["valid"]


@installed
@pytest.mark.parametrize("subset", [*MULTI_TURN, "multi_turn_long_context"])
def test_gold_of_multi_turn_through_the_whole_path(bench, subset, tmp_path, monkeypatch):
    """All 200 as dialogues with the tool objects, with the benchmark's executor and `eval` out of order.

    One of base has five questions and an answer of six turns: its gold is right, and no model can give it.
    """
    utils = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    monkeypatch.setattr(utils, "execute_multi_turn_func_call", None)
    monkeypatch.setattr(builtins, "eval", None)
    entries, rows = bench.entries(subset), {}
    for entry in entries:
        texts = [turn_text(turn) or "I cannot do that." for turn in gold_dialogue(bench, entry)]
        agent = Scripted(player([entry], lambda e, texts=texts: texts))
        rows[entry["id"]] = json.loads(json.dumps(bfcl.run_item(agent, bench, subset, entry, threading.Event())))
    found = bfcl.score_subset(bench, subset, entries, rows, tmp_path)
    odd = ["multi_turn_base_154"] if subset == "multi_turn_base" else []
    assert found == counts(200, 200 - len(odd), None) | {"malformed": 0}
    assert [line["id"] for line in score_lines(tmp_path, subset)[1:]] == odd
    for entry in entries:
        turns = [[read_reply(turn_text(turn))[2]] for turn in gold_dialogue(bench, entry)]
        assert bench.check_turns(entry, turns)["valid"], entry["id"]
    for entry in entries[:10]:
        calls = gold_dialogue(bench, entry)
        due = [i for i, turn in enumerate(entry["ground_truth"]) if turn]
        empty = [[] if i == due[0] else [turn] for i, turn in enumerate(calls)]
        assert bench.check_turns(entry, empty)["error_type"] == "multi_turn:empty_turn_model_response"
        assert bench.check_turns(entry, [[turn] for turn in calls[:-1]])["error_type"] == "multi_turn:force_terminated"
        others = [[[{"name": "no_such", "arguments": {}}]] for _ in calls]
        assert not bench.check_turns(entry, others)["valid"]


@installed
def test_wrong_state_and_wrong_answers_of_tools(bench):
    entry = bench.entries("multi_turn_base")[0]
    calls = gold_dialogue(bench, entry)
    step = next(c for c in calls[0] if c["name"] == "mkdir")
    step["arguments"]["dir_name"] = "elsewhere"
    assert bench.check_turns(entry, [[turn] for turn in calls])["error_type"] == "multi_turn:instance_state_mismatch"
    calls = gold_dialogue(bench, entry)
    looks = next(i for i, turn in enumerate(calls) if any(c["name"] == "grep" for c in turn))
    next(c for c in calls[looks] if c["name"] == "grep")["arguments"]["pattern"] = "x"
    found = bench.check_turns(entry, [[turn] for turn in calls])
    assert found["error_type"] == "multi_turn:execution_response_mismatch"


# --- nothing is evaluated --------------------------------------------------------------------------------------------

@installed
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_in_a_call_executes_nothing(bench, tmp_path, monkeypatch, attack):
    """As an argument, as an argument's name, as a tool's name; in single and multi-turn, while run and while scored."""
    target = tmp_path / "touched"
    code = attack.format(target)
    monkeypatch.setattr(builtins, "eval", None)
    call_forms = [{"name": "cd", "arguments": {"folder": code}}, {"name": code, "arguments": {}},
                  {"name": "cd", "arguments": {code: 1}}, {"name": f"cd(folder={code}) or cd", "arguments": {}},
                  {"name": "_load_scenario", "arguments": {"scenario": {}}}, {"name": "__init__", "arguments": {}},
                  {"name": "__class__", "arguments": {}}, {"name": "cd.__globals__", "arguments": {}}]
    text = turn_text(call_forms)

    def script(messages, tools):
        return "Done." if messages[-1]["role"] == "tool" else text
    agent = Scripted(script)
    subsets = ["simple", "java", "javascript", "irrelevance", "multi_turn_base", "multi_turn_miss_func"]
    found = run(agent, bench, subsets, 2, 4, tmp_path / "out")
    assert not target.exists()
    assert all(s["correct"] == 0 and s["malformed"] == 0 for s in found["subsets"].values())
    (row,) = [r for r in finished(result_file(tmp_path / "out", "multi_turn_base")).values() if r["id"].endswith("_0")]
    assert len(row["result"][0][0]) == len(call_forms)  # all of them were calls, and were answered
    answers = [m["content"] for m in row["inference_log"][0]["step_0"] if m["role"] == "tool"]
    assert "is not defined" in answers[1] and "unexpected keyword" in answers[2]
    assert all("is not defined" in a for a in answers[4:])


def test_gold_calls_are_parsed():
    assert gold_call("sort('a.txt')") == ("sort", ["a.txt"], {}) and gold_call("f(x=-1, y=[{'a': None}])")[2] == {
        "x": -1, "y": [{"a": None}]}
    for bad in ("f(x=g())", "a.b()", "1", "f(**{})", "f(", "__import__('os').system('x')", "f(x=y)"):
        with pytest.raises(ValueError, match="expected one call by name with literal arguments"):
            gold_call(bad)
    names = [n.func.id for m in (bfcl, bfcl_checks) for n in ast.walk(ast.parse(inspect.getsource(m)))
             if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert not {"eval", "exec", "compile", "__import__"} & set(names)


@installed
def test_a_call_cannot_take_hours(bench):
    """9 ** 9 ** 9 and a million digits would hold the run up."""
    objects = bench.tool_objects({"id": "multi_turn_base_x", "involved_classes": ["MathAPI"], "initial_config": {}})
    assert json.loads(objects.call("power", {"base": 2, "exponent": 10})) == {"result": 1024}
    for name, arguments in (("power", {"base": 9, "exponent": 9**9}), ("power", {"base": 10**4000, "exponent": 9999}),
                            ("logarithm", {"value": 2, "base": 3, "precision": 10**8}),
                            ("logarithm", {"value": 2, "base": 3, "precision": "1000000"}),
                            ("round_number", {"number": 7, "decimal_places": -10**9})):
        assert "is too large" in objects.call(name, arguments)
    entry = bench.entries("java")[0]
    calls = gold_calls(entry, "Java")
    calls[0]["arguments"] = {k: "new HashMap<>() {{" + "\n" * 2000 for k in calls[0]["arguments"]}
    assert bench.check_calls("java", entry, calls)["error"] == ["a value with 50 blanks in a row"]


@installed
def test_directories_without_end_are_scored(bench, tmp_path):
    """A state too deep to be written, and arguments too deep to be written again, are wrong and no error."""
    entry = next(e for e in bench.entries("multi_turn_base") if "GorillaFileSystem" in e["involved_classes"])
    deep = [{"name": name, "arguments": {key: "a"}} for _ in range(400)
            for name, key in (("mkdir", "dir_name"), ("cd", "folder"))]
    row = bfcl.run_item(Scripted(player([entry], lambda e: [turn_text(deep), "done"] * len(e["question"]))), bench,
                        "multi_turn_base", entry, threading.Event())
    found = bfcl.score_subset(bench, "multi_turn_base", [entry], {entry["id"]: row}, tmp_path)
    assert found["correct"] == 0 and (tmp_path / "score" / MODEL / "BFCL_v3_multi_turn_base_score.json").is_file()
    reply = Reply("", "", None, [{"name": "f", "arguments": nested(100000)}], False, [], [], True, 0, 0)
    assert bfcl.called(reply) == []


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


# --- the run ---------------------------------------------------------------------------------------------------------

@installed
def test_a_run_of_gold_is_saved_resumed_and_refused(bench, tmp_path):
    subsets = ["simple", "multi_turn_miss_func"]
    entries = {s: bench.entries(s)[:4] for s in subsets}
    texts = {e["id"]: [turn_text(gold_calls(e))] for e in entries["simple"]}
    texts |= {e["id"]: [turn_text(t) or "I lack a tool." for t in gold_dialogue(bench, e)]
              for e in entries["multi_turn_miss_func"]}
    script = player([e for s in subsets for e in entries[s]], lambda e: texts[e["id"]])
    agent = Scripted(script)
    whole = run(agent, bench, subsets, 4, 3, tmp_path / "a")
    assert [(s["n"], s["correct"]) for s in whole["subsets"].values()] == [(4, 4), (4, 4)]
    assert whole["subsets"]["multi_turn_miss_func"]["lenient_correct"] is None and whole["limit"] == 4
    # the function that was held back is there from its turn on, after the benchmark's own words
    entry = entries["multi_turn_miss_func"][0]
    (turn, held), = entry["missed_function"].items()
    name = held[0]["name"]
    shown = [(sum(m["role"] == "user" for m in messages), messages, [t["function"]["name"] for t in tools])
             for messages, tools in agent.asked if messages[0] == entry["question"][0][0]]
    assert all((name in tools) == (users > int(turn)) for users, _, tools in shown)
    assert {m["content"] for users, messages, _ in shown for m in messages if m["role"] == "user"} >= {
        "I have updated some more functions you can choose from. What about now?"}

    # killed after three items, the last one half written; the file goes on to the same result
    lines = result_file(tmp_path / "a", "simple").read_text().split("\n")
    half = result_file(tmp_path / "b", "simple")
    half.parent.mkdir(parents=True)
    half.write_text("\n".join([*lines[:2], lines[2][:40]]))
    again = Scripted(script)
    assert run(again, bench, ["simple"], 4, 2, tmp_path / "b")["subsets"]["simple"] == whole["subsets"]["simple"]
    assert len(again.asked) == 2
    same = [{i: row["result"] for i, row in finished(result_file(tmp_path / x, "simple")).items()} for x in "ab"]
    assert same[0] == same[1]
    run(again, bench, ["simple"], 4, 2, tmp_path / "b")
    assert len(again.asked) == 2  # nothing is left to do


@installed
def test_strict_beside_lenient(bench, tmp_path):
    """The right call without tags is right leniently; beside a broken block it is too; a wrong one never is."""
    entries = bench.entries("simple")[:4]
    good = [gold_calls(e)[0] for e in entries]
    text = [turn_text([good[0]]), "Sure: " + json.dumps(good[1]),
            turn_text([good[2]]) + "<tool_call>\n{oops\n</tool_call>",
            "Sure: " + json.dumps(good[3] | {"arguments": {}})]
    script = player(entries, lambda e: [text[entries.index(e)]])
    found = run(Scripted(script), bench, ["simple"], 4, 1, tmp_path)["subsets"]["simple"]
    assert found == counts(4, 1, 3)


@installed
def test_dots_system_messages_and_prompts_that_are_too_long(bench, tmp_path):
    entries = bench.entries("live_multiple")
    at = next(i for i, e in enumerate(entries) if e["question"][0][0]["role"] == "system")
    agent = Scripted(lambda messages, tools: "")
    bfcl.run_item(agent, bench, "live_multiple", entries[at], threading.Event())
    assert [m["role"] for m in agent.asked[0][0]] == ["user"]
    dotted = next(e for e in bench.entries("simple") if "." in e["function"][0]["name"])
    (call,) = gold_calls(dotted)
    assert "_" in call["name"] and bench.check_calls("simple", dotted, [call])["valid"]
    reply = Reply("", *read_reply(turn_text([call | {"name": dotted["function"][0]["name"]}])), [], [], True, 0, 0)
    assert bfcl.called(reply) == [call]

    def refuse(messages, tools):
        raise PromptTooLong("a prompt of 9 tokens")
    found = run(Scripted(refuse), bench, ["simple", "irrelevance", "multi_turn_base"], 2, 2, tmp_path)
    assert [(s["correct"], s["lenient_correct"], s["too_long"]) for s in found["subsets"].values()] == [
        (0, 0, 2), (0, 0, 2), (0, None, 2)]


@installed
def test_a_policy_that_never_stops_calling_is_stopped(bench, tmp_path):
    """The benchmark ends the item when a turn has called in more than 20 steps; what it never asked is wrong."""
    agent = Scripted(lambda messages, tools: turn_text([{"name": "ls", "arguments": {}}]))
    found = run(agent, bench, ["multi_turn_base"], 1, 1, tmp_path)
    assert len(agent.asked) == 21 and found["subsets"]["multi_turn_base"]["correct"] == 0
    assert score_lines(tmp_path, "multi_turn_base")[1]["error"]["error_type"] == "multi_turn:force_terminated"


@installed
def test_an_error_of_the_agent_ends_the_run_and_keeps_what_is_done(bench, tmp_path):
    entries = bench.entries("simple")[:3]
    texts = {entries[0]["id"]: ["a"], entries[1]["id"]: ["b"]}
    script = player(entries[:2], lambda e: texts[e["id"]])
    with pytest.raises(KeyError):
        run(Scripted(script), bench, ["simple"], 3, 1, tmp_path)
    assert list(finished(result_file(tmp_path, "simple")))[:2] == [entries[0]["id"], entries[1]["id"]]


@installed
def test_the_benchmarks_own_evaluator_reads_the_results(bench, tmp_path, monkeypatch):
    """Its runner, with its handler's decoding, gives our figures from our files, and reads back our score files."""
    monkeypatch.setenv("BFCL_PROJECT_ROOT", str(tmp_path))
    dotenv = types.ModuleType("dotenv")
    dotenv.load_dotenv = None
    monkeypatch.setitem(sys.modules, "dotenv", dotenv)
    runner = pytest.importorskip("bfcl_eval.eval_checker.eval_runner")

    class Handler:  # decode_ast and decode_execute of its OpenAIHandler, which needs a client
        @staticmethod
        def decode_ast(result, language):
            return [{k: json.loads(v)} for call in result for k, v in call.items()]

        @staticmethod
        def decode_execute(result):
            return [f"{k}({','.join(f'{n}={v!r}' for n, v in json.loads(a).items())})"
                    for call in result for k, a in call.items()]

    subsets = ["parallel", "java", "irrelevance", "multi_turn_base"]
    entries = {s: bench.entries(s) for s in subsets}
    rows = {}
    for subset in subsets:
        rows[subset] = {}
        for i, entry in enumerate(entries[subset]):
            if subset == "irrelevance":
                texts = ["no"] if i % 3 else [turn_text([{"name": "f", "arguments": {}}])]
            elif subset == "multi_turn_base":
                texts = [turn_text(t if i % 4 else t[:1]) for t in gold_dialogue(bench, entry)]
            else:
                texts = [turn_text(gold_calls(entry, language_of(subset)) if i % 5 else [])]
            agent = Scripted(player([entry], lambda e, texts=texts: texts))
            rows[subset][entry["id"]] = bfcl.run_item(agent, bench, subset, entry, threading.Event())
        ours = bfcl.score_subset(bench, subset, entries[subset], rows[subset], tmp_path / "ours")
        saved = json.loads(json.dumps(list(rows[subset].values())))
        saved.sort(key=runner.sort_key)
        state = {"leaderboard_table": {}}
        runner.evaluate_task(subset, tmp_path, tmp_path / "theirs", saved, MODEL, Handler, state)
        name = f"BFCL_v3_{subset}_score.json"
        a, b = (runner.load_file(tmp_path / at / MODEL / name) for at in ("ours/score", "theirs"))
        assert a[0] == b[0] and a[0]["correct_count"] == ours["correct"] and 0 < ours["correct"] < ours["n"]
        assert [x["id"] for x in a[1:]] == [x["id"] for x in b[1:]]
        assert b[1].keys() - a[1].keys() <= {"inference_log", "model_result", "decoded_result", "model_result_raw"}


@installed
def test_the_suite_with_a_policy_and_a_folder_of_files(bench, tmp_path, capsys):
    """A fresh tiny policy, an unpacked wheel: runs, is refused under other weights, goes on under its own."""
    tokenizer = world_tokenizer(examples=150)
    for name, seed in (("one", 1), ("two", 2)):
        policy = new_policy(ModelConfig(vocab_size=tokenizer.size, hidden_size=16, intermediate_size=16,
                                        num_hidden_layers=1, max_position_embeddings=1200), seed)
        save_policy(policy, tmp_path / name, tokenizer)
    wheel = tmp_path / "wheel"
    shutil.copytree(bench.root, wheel / "bfcl_eval", ignore=shutil.ignore_patterns("unused_datasets", "__pycache__"))
    parser = argparse.ArgumentParser()
    bfcl.add_options(parser)
    args = parser.parse_args(["--subset", "simple", "multi_turn_base"])
    args.checkpoint, args.data, args.out = tmp_path / "one", str(wheel), str(tmp_path / "out")
    args.limit, args.rows, args.temperature = 2, 3, 0.0
    policy = load_policy(args.checkpoint)
    summary = suite(args, CFG, policy, tokenizer)
    assert summary["subsets"]["simple"]["n"] == 2 and not summary["groups"]["Overall"]["whole"]
    assert summary["subsets"]["multi_turn_base"]["too_long"] == 2  # their tools alone are longer
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "pooled over what was run, of 3101" in capsys.readouterr().out
    assert suite(args, CFG, policy, tokenizer) == summary
    args.checkpoint = tmp_path / "two"
    with pytest.raises(ValueError, match="another run, different in checkpoint_sha256"):
        suite(args, CFG, load_policy(args.checkpoint), tokenizer)
    (wheel / "bfcl_eval" / "data" / "BFCL_v3_java.json").write_text("{}\n")
    with pytest.raises(ValueError, match=r"not the files of bfcl-eval 2025\.6\.16"):
        suite(args, CFG, policy, tokenizer)
    args.out, args.limit = None, 0
    with pytest.raises(ValueError, match="--out FOLDER is missing"):
        suite(args, CFG, policy, tokenizer)
    args.out = str(tmp_path / "out")
    with pytest.raises(ValueError, match="--limit: expected 1 or more, found 0"):
        suite(args, CFG, policy, tokenizer)
    args.temperature = 0.7
    with pytest.raises(ValueError, match="greedy"):
        suite(args, CFG, policy, tokenizer)
    with pytest.raises(SystemExit):
        parser.parse_args(["--subset", "rest"])
