"""Responders and judge beyond the rules: a frozen model that is asked in batches and remembered, and own functions."""
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import test_endpoint
import test_rollout
import yaml
from test_model import drawn
from test_rollout import CALL, REPLY, TASK, TOOL, ids_of, settings

from slca import llm, memory
from slca.config import ConfigError, load_config
from slca.judge import LLMJudge, Reply, RulesJudge, examiner_chat, make_judge, score_episodes
from slca.llm import Writer
from slca.model import ModelConfig
from slca.responders import (
    RESPONSE,
    LLMResponder,
    PythonTools,
    function_schema,
    make_simulator,
    server_chat,
    unwrap,
)
from slca.settings import JudgeConfig, LLMConfig, RewardConfig, SimulatorConfig
from slca.simulator import Simulator, is_error, is_failure
from slca.weights import save_policy

play, tok, policy, serve = test_rollout.play, test_rollout.tok, test_rollout.policy, test_endpoint.serve
GOOD = {"name": "find_stock", "arguments": {"symbol": "Bakedo"}}
CHATS = [[{"role": "system", "content": "Short."}, {"role": "user", "content": f"Say {i}."}] for i in range(9)]


class Says:
    """A writer whose answers are a function of the chat; it remembers what it was asked."""

    def __init__(self, answer):
        self.answer, self.rounds = answer, []

    def texts(self, chats):
        self.rounds.append(chats)
        return [self.answer(c) for c in chats]


# ---- the frozen model as simulator

@pytest.mark.parametrize("text, want", [
    ("<tool_response>41</tool_response>", "41"), (" plain \n", "plain"), ("", ""),
    ("Sure.\n<tool_response>\n{\"a\": 1}\n</tool_response> Done.", '{"a": 1}'),
    ("<tool_response>1</tool_response><tool_response>2</tool_response>", "2"),  # the last complete one
    ("<tool_response>1</tool_response> then <tool_response>2", "1"),  # complete before dangling
    ("<tool_response><tool_response>in</tool_response></tool_response>", "in"),
    ("<tool_response><tool_call>in</tool_call></tool_response>", "in"),
    ("<tool_call>a</tool_call> x <tool_response>b</tool_response>", "b"),  # a response before a call
    ("<tool_call>a</tool_call> x", "a"), ("so: <tool_response>{\"a\": ", '{"a":'), ("<tool_call>q", "q"),
    ("a</tool_response>", "a</tool_response>"), ("<tool_response></tool_response>", ""),
    ("<tool_call><tool_response>late", "late"),
])
def test_unwrapping(text, want):
    assert unwrap(text) == want


def test_unwrapping_takes_linear_time():
    for text in ("<tool_response>" * 20000, "</tool_response>" * 20000, "<tool_call>" * 9999 + "</tool_call>" * 2):
        unwrap(text)


def test_the_model_sees_one_tool_and_one_request():
    system, user = server_chat(GOOD, TOOL["function"])
    assert f"<{RESPONSE}>" in system["content"] and system["role"] == "system"
    assert json.dumps(TOOL["function"], indent=2) in user["content"]
    assert '{"name": "find_stock", "parameters": {"symbol": "Bakedo"}, "dependency": []}' in user["content"]
    _, loose = server_chat(GOOD, None)
    assert "definition" not in loose["content"] and "find_stock" in loose["content"]


def test_calls_of_a_round_are_asked_together_and_bad_ones_not_at_all(play, tok):
    writer = Says(lambda c: f"<tool_response>{len(c[1]['content'])} shares</tool_response>")
    bad = CALL.replace("Bakedo", "Bakedo\", \"days\": \"many")
    turns = [[CALL, REPLY], [bad, CALL, REPLY], [f"<tool_call>\n[{json.dumps(GOOD)}, {json.dumps(GOOD)}]\n</tool_call>",
                                                 REPLY]]
    episodes = play([[i for t in script for i in ids_of(t, tok)] for script in turns],
                    simulator=Simulator(LLMResponder(writer)))
    assert [len(chats) for chats in writer.rounds] == [3, 1]
    assert [e.status for e in episodes] == ["answered"] * 3 and [e.call_errors for e in episodes] == [0, 1, 0]
    results = [text for e in episodes for role, text in e.turns if role == "tool"]
    assert sum(r.endswith(" shares") for r in results) == 4 and sum(map(is_error, results)) == 1


@pytest.mark.parametrize("broken", [lambda _: [], lambda _: [5], lambda _: 1 / 0, lambda _: None])
def test_a_broken_responder_of_batches_fails_its_calls_alone(broken):
    simulator = Simulator(type("Broken", (), {"answer_all": staticmethod(broken)})())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = simulator.respond_all([(GOOD, [TOOL]), ({"name": "?"}, [TOOL])])
    assert is_failure(seen[0]) and "not found" in seen[1]


@pytest.mark.parametrize("answer", [None, "", "  \n", "<tool_response> </tool_response>"])
def test_no_answer_is_the_responders_failure(answer, play, tok):
    e = play([ids_of(CALL, tok) + ids_of(REPLY, tok)], simulator=Simulator(LLMResponder(Says(lambda _: answer))))[0]
    assert (e.responder_failures, e.call_errors, e.status) == (1, 0, "answered")


def test_without_schema_the_model_is_asked_for_anything():
    writer = Says(lambda c: "42")
    simulator = Simulator(LLMResponder(writer), use_schema=False)
    assert simulator.respond({"name": "nobody", "arguments": {"x": [1]}}, [TOOL]) == "42"
    assert "definition" not in writer.rounds[0][0][1]["content"]


# ---- the frozen model itself

@pytest.fixture(scope="module")
def folder(tmp_path_factory, tok):
    """A random model that still ends its turns now and then."""
    path = tmp_path_factory.mktemp("frozen")
    save_policy(drawn(ModelConfig("qwen3", tok.size, 32, 48, 2, 4, 2)), path)
    tok.save(path)
    return str(path)


def model(folder, **more) -> LLMConfig:
    return LLMConfig(path=folder, max_new_tokens=24, concurrency=4, **more)


def test_an_answer_does_not_depend_on_who_is_asked_with_it(folder):
    together = Writer("model", model(folder)).texts(CHATS)
    assert all(isinstance(t, str) for t in together) and len(set(together)) > 5
    backwards = Writer("model", model(folder)).texts(CHATS[::-1])[::-1]
    alone = [Writer("model", model(folder)).texts([c])[0] for c in CHATS[:3]]
    assert together == backwards and together[:3] == alone
    assert Writer("model", model(folder), seed=1).texts(CHATS) != together
    greedy = [Writer("model", model(folder, temperature=0.0), seed=s).texts(CHATS) for s in (0, 1)]
    assert greedy[0] == greedy[1] != together


def test_the_same_chat_is_written_once_and_the_folder_remembers(folder, tmp_path):
    cfg = model(folder, cache=str(tmp_path / "said"))
    first = Writer("model", cfg)
    texts = first.texts([*CHATS, *CHATS])
    assert texts[:9] == texts[9:] and first.take_counts() | {"seconds": 0, "tokens": 0} == {
        "asked": 9, "cached": 9, "tokens": 0, "seconds": 0}
    again = Writer("model", cfg)
    again.write = None  # it must not be asked
    assert again.texts(CHATS) == texts[:9] and again.take_counts()["cached"] == 9
    other = Writer("model", replace(cfg, temperature=0.9))
    other.texts(CHATS[:1])
    assert other.take_counts()["asked"] == 1  # another question


def test_a_cut_off_line_of_the_memory_is_asked_again(folder, tmp_path):
    cfg = model(folder, cache=str(tmp_path))
    texts = Writer("model", cfg).texts(CHATS[:3])
    path = tmp_path / "rank0.jsonl"
    path.write_text(path.read_text()[:-7])  # killed while it wrote the third
    (tmp_path / "rank1.jsonl").write_bytes(b"\xff\xfe\x00\n" + b"[" * 100_000)
    with pytest.warns(UserWarning, match="3 unreadable"):
        writer = Writer("model", cfg)
    assert writer.texts(CHATS[:4])[:3] == texts and writer.take_counts()["asked"] == 2
    with pytest.warns(UserWarning, match="3 unreadable"):
        assert len(Writer("model", cfg).known) == 4


def test_a_memory_that_cannot_be_written_costs_no_answer(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be remembered"):
        assert None not in Writer("model", model(folder, cache=str(tmp_path / "file"))).texts(CHATS[:2])


def test_what_is_too_long_gets_no_answer(folder, monkeypatch):
    monkeypatch.setattr(llm, "REACH", 120)
    long = [{"role": "user", "content": "many words " * 60}]
    with pytest.warns(UserWarning, match="1 chats are over 96 tokens"):
        texts = Writer("model", model(folder)).texts([CHATS[0], long, CHATS[1]])
    assert texts[1] is None and None not in texts[::2]


def test_reasoning_is_left_out():
    writer = object.__new__(Writer)
    writer.identity, writer.known, writer.asked, writer.cached, writer.cfg = [], {}, 0, 0, LLMConfig()
    writer.write = lambda chats, keys, temperature: ["<think>it is <rating>poor</rating></think>\n41",
                                                     "<think>\nThe user wants"]
    assert writer.texts(CHATS[:2]) == ["\n41", None]  # one that was cut off in its thought says nothing


def test_in_process_observations_repeat_and_are_counted(folder, play, tok):
    """Two runs with one model: the same calls, the same observations; all calls of a round in one batch."""
    scripts = [ids_of(CALL.replace("Bakedo", s), tok) + ids_of(REPLY, tok) for s in ("Bakedo", "Mirelo", "Tavani")]
    seen = []
    for _ in range(2):
        simulator = make_simulator(SimulatorConfig(responder="model", llm=model(folder)))
        rounds, ask = [], simulator.responder.writer.write

        def counted(chats, *more, ask=ask, rounds=rounds):
            rounds.append(len(chats))
            return ask(chats, *more)

        simulator.responder.writer.write = counted
        episodes = play(scripts, simulator=simulator)
        seen.append([e.turns for e in episodes])
        assert rounds == [3]
        counts = llm.counts(simulator.responder, RulesJudge())
        assert counts["frozen_asked"] == 3 and counts["frozen_tok_s"] > 0
    assert seen[0] == seen[1]
    assert llm.counts(Simulator().responder, RulesJudge()) == {}


def test_at_a_server(serve):
    server = serve(lambda h: h.answer(json.dumps(test_endpoint.said(
        "<tool_response>41</tool_response>" if "Request:" in h.asked["messages"][1]["content"] else
        "<response_quality><rating>Good</rating></response_quality>")).encode()))
    at = LLMConfig(url=server.url, retries=0)
    assert make_simulator(SimulatorConfig(responder="http", llm=at)).respond(GOOD, [TOOL]) == "41"
    assert make_judge(JudgeConfig(kind="http", llm=at)).rate([Reply("q", ["41"], "It is 41.")]) == [0.75]
    gone = LLMConfig(url="http://127.0.0.1:9/v1", name="m", retries=0, timeout_s=1)
    with pytest.warns(UserWarning, match="1 of 1 requests failed"):
        assert is_failure(make_simulator(SimulatorConfig(responder="http", llm=gone)).respond(GOOD, [TOOL]))


# ---- the judge

def test_the_judge_sees_question_results_and_reply_but_no_calls():
    _, user = examiner_chat(Reply("What is it?", ["41 ", "42"], REPLY))
    assert user["content"] == (f"# Conversation\nWhat is it?\n\n# Tool results\n[Tool Response 1]\n41\n\n"
                               f"[Tool Response 2]\n42\n\n# Reply\n{REPLY}")


def test_ratings_failures_and_agreement(play, tok):
    ratings = iter(["excellent", "very poor", "no idea", None])
    judge = LLMJudge(Says(lambda _: (r := next(ratings)) and
                          f"<response_quality><reasoning>x</reasoning><rating>{r}</rating></response_quality>"))
    answer = Simulator(lambda *_: '{"price": 41}')
    episodes = play([ids_of(CALL, tok) + ids_of(REPLY, tok)] * 4, simulator=answer)
    score_episodes(episodes, judge, RewardConfig(), failure_score=0.5)
    assert [e.rewards.summary for e in episodes] == [1, 0, .5, .5]
    assert [e.judge_failures for e in episodes] == [0, 0, 1, 1]
    assert [e.judge_agrees for e in episodes] == [True, False, None, None]  # the rules find it excellent
    assert len(judge.writer.rounds) == 1  # one batch
    score_episodes(episodes, RulesJudge(), RewardConfig())
    assert [e.judge_agrees for e in episodes] == [True] * 4


# ---- own functions

TOOLS = '''
"""My tools."""
from __future__ import annotations

import time
from typing import Literal

COUNT = []


def price(symbol: str, days: int = 1, kind: Literal["low", "high"] = "low", tags: list[str] | None = None) -> dict:
    """Price of a share,
    in crowns.

    Args:
        symbol: its short name,
            as the exchange has it
        days (int): how long ago; note: not a parameter
    Returns:
        symbol: not this one
    """
    COUNT.append(symbol)
    return {"symbol": symbol, "price": 40 + days, "calls": len(COUNT)}


def fails(x: float):
    """:param x: any number"""
    raise KeyError(f"no {x}")


def sleeps() -> str:
    time.sleep(5)
    return "late"


def _helper():
    pass
'''


@pytest.fixture
def tools_file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


def test_schemas_of_own_functions(tools_file):
    price, fails, sleeps = (t["function"] for t in PythonTools(tools_file).schemas)
    assert price == {
        "name": "price", "description": "Price of a share, in crowns.", "parameters": {
            "type": "object", "required": ["symbol"], "additionalProperties": False, "properties": {
                "symbol": {"type": "string", "description": "its short name, as the exchange has it"},
                "days": {"type": "integer", "default": 1, "description": "how long ago; note: not a parameter"},
                "kind": {"enum": ["low", "high"], "default": "low"},
                "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}}}}
    assert fails["parameters"]["properties"] == {"x": {"type": "number", "description": "any number"}}
    assert sleeps["description"] == "" and sleeps["parameters"]["required"] == []


def test_own_functions_answer(tools_file):
    tools = PythonTools(tools_file)
    simulator = Simulator(tools, timeout_s=0.2)

    def ask(name, **arguments):
        return simulator.respond({"name": name, "arguments": arguments}, tools.schemas)

    assert json.loads(ask("price", symbol="é", days=2.0)) == {"symbol": "é", "price": 42, "calls": 1}
    assert json.loads(ask("price", symbol="b"))["calls"] == 2  # a state is kept
    assert json.loads(ask("fails", x=1)) == {"error": "KeyError: 'no 1'"} and not is_failure(ask("fails", x=1))
    for arguments in ({}, {"symbol": 3}, {"symbol": "a", "kind": "mid"}, {"symbol": "a", "more": 1}):
        assert is_error(ask("price", **arguments))
    assert "not found" in ask("_helper") and "not found" in ask("COUNT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert is_failure(ask("sleeps"))
    assert "has no function" in simulator.respond({"name": "find_stock", "arguments": {"symbol": "b"}}, [TOOL])
    assert "TypeError" in Simulator(tools, use_schema=False).respond({"name": "price", "arguments": {}}, [])


@pytest.mark.parametrize("text, words", [
    ("x = 1", "defines no public function"), ("def f(:", "cannot be imported: SyntaxError"),
    ("raise RuntimeError('no')", "cannot be imported: RuntimeError: no"),
    ("def f(*names): pass", "f, parameter names: expected one that is given by its name"),
    ("def f(x, /): pass", "parameter x: expected one"), ("def f(x: bytes): pass", "parameter x: expected str, int"),
    ("def f(x: 'Nope'): pass", "annotations cannot be read"), ("def f(x: [str]): pass", "parameter x: expected str"),
    ("import sys; sys.exit(3)", "cannot be imported: SystemExit"), ("async def f(): pass", "expected a plain function"),
    ("def f():\n yield 1", "expected a plain function"), ("def f(x=float('nan')): pass", "a default is no JSON"),
     ("def f(x=object()): pass", "a default is no JSON")])
def test_files_that_are_no_tools(text, words, tmp_path):
    (tmp_path / "t.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        PythonTools(tmp_path / "t.py")


def test_tools_go_by_the_names_they_have_in_the_file(tmp_path):
    (tmp_path / "t.py").write_text("""
import functools
from typing import List

def twice(f):
    def wrapper(x: int) -> int:
        return 2 * f(x)
    return wrapper

@twice
def one(x): return x

@functools.lru_cache
def two(xs: List, y: float = 0.5): return float("nan") if y else xs

other = lambda: {1, 2}
""")
    tools = PythonTools(tmp_path / "t.py")
    assert [t["function"]["name"] for t in tools.schemas] == ["twice", "one", "two", "other"]
    simulator = Simulator(tools)
    assert simulator.respond({"name": "one", "arguments": {"x": 4}}, tools.schemas) == "8"
    assert "unhashable" in simulator.respond({"name": "two", "arguments": {"xs": []}}, tools.schemas)
    assert "not JSON compliant" in json.dumps(Simulator(tools, use_schema=False).respond(
        {"name": "two", "arguments": {"xs": 1}}, []))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.py"):
        PythonTools(tmp_path / "none.py")


def test_plain_types():
    def f(a, b: Any, c: dict, d: dict[str, int], e: list, g: bool | None, h: Literal[1, "x"], i: None): ...
    assert function_schema(f, "f", "here")["function"]["parameters"]["properties"] == {
        "a": {}, "b": {}, "c": {"type": "object"}, "d": {"type": "object"}, "e": {"type": "array"},
        "g": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "h": {"enum": [1, "x"]}, "i": {"type": "null"}}


def test_the_readmes_example_trains(folder, tmp_path):
    """Its two files and its command as they stand there, with a random model and one step."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", readme[readme.index("## Your tools"):], re.DOTALL)
    (tmp_path / "my_tools.py").write_text(blocks[0])
    (tmp_path / "my_tasks.jsonl").write_text(blocks[1])
    words = blocks[2].replace("\\\n", " ").replace("=DIR", f"={folder}").split()
    assert words[:2] == ["torchrun", "train.py"]
    run = subprocess.run([sys.executable, str(Path(__file__).parent.parent / "train.py"), *words[2:], "rl.steps=1",
                          "rl.group_size=4", "eval.every=0", "rollout.max_prompt_tokens=1024", "threads=1",
                          "eval.max_response_tokens=60", "rollout.max_response_tokens=60"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    summary = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert summary["after_rl"]["n"] == 2 and summary["after_rl"]["gold_calls_per_task"] == 0.5
    config = yaml.safe_load(Path(tmp_path, "runs/mine/config.yaml").read_text())
    assert config["simulator"]["responder"] == "python"
    assert "book_table" in next(Path(tmp_path, "runs/mine/rollouts").iterdir()).read_text()


def test_frozen_models_are_in_the_memory_plan(folder):
    """By hand: weights once, packed once for each asker, and a cache of 4 rows of 2048 + 24 tokens."""
    both = load_config([], ["simulator.responder=model", "judge.kind=model", *(
        f"{who}.llm.{what}" for who in ("simulator", "judge") for what in (f"path={folder}", "concurrency=4",
                                                                            "max_new_tokens=24"))])
    policy = llm.frozen_policy(folder)[0]
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    cache = 2 * 2 * 4 * 2 * (2048 + 24) * 8 * next(policy.parameters()).element_size()
    found, alone = (memory.plan(cfg, policy.config, 1) for cfg in (both, load_config()))
    assert found["frozen"] == found["peak"] - alone["peak"] == 3 * weights + 2 * cache and alone["frozen"] == 0


# ---- configuration

@pytest.mark.parametrize("settings_, words", [
    (["simulator.responder=model"], "simulator.llm.path"), (["judge.kind=http"], "judge.llm.url"),
    (["simulator.llm.path=x"], "null without"), (["simulator.responder=python"], "simulator.python"),
    (["simulator.python=t.py"], "simulator.python"),
    (["judge.kind=http", "judge.llm.url=http://h/v1", "judge.noise=0.1"], "judge.noise"),
    (["judge.llm.name=x"], "judge.llm.name: .*judge.kind rules asks no model"),
    (["simulator.llm.cache=x"], "simulator.llm.cache")])
def test_settings_that_do_not_fit(settings_, words):
    with pytest.raises(ConfigError, match=words):
        load_config([], settings_)


def test_the_judge_is_greedy_unless_told_otherwise():
    assert load_config([], ["judge.kind=http", "judge.llm.url=http://h/v1"]).judge.llm.temperature == 0
    assert load_config().simulator.llm.temperature == 0.6
    assert settings().simulator.responder == "rules" and TASK.tools == [TOOL]
