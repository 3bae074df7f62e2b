"""Proves: an agent's turn is what the sampler alone would write, whoever shares the batch and whatever it kept.

Threads that ask at once get the greedy text of one at a time, and the sampled text of their seed; a dialogue that goes
on, one that begins like another, and one whose slot was taken get the tokens of a fresh agent; kept tokens are not run
again. Stops, pieces and cancelling do what they say; a fault ends its own turn. `read_reply` by hand, strict
and lenient.
"""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_sampler import make

from slca import agent as agent_module
from slca import chat, slots
from slca.agent import Agent, PromptTooLong, Reply, read_reply
from slca.sampler import generate
from slca.tokenizer import train_bpe

TOOLS = [{"type": "function", "function": {"name": "look", "description": "look it up " * 8, "parameters": {}}}]


@pytest.fixture(scope="module")
def world():
    tokenizer = train_bpe(["hello world, the end of it 日本語"] * 3, 330, ("<|im_start|>", "<|im_end|>"),
                          ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"))
    policy = make(tokenizer.size, max_position_embeddings=700)
    return policy, tokenizer


@pytest.fixture
def agent(world):
    agent = Agent(*world, rows=4)
    yield agent
    agent.close()


def dialogue(n: int) -> list[dict]:
    return [{"role": "user", "content": f"hello {n} world" * (1 + n % 3)}]


def alone(world, messages, tools=None, n=24, temperature=0.0, seed=0):
    policy, tokenizer = world
    prompt = chat.render(messages, tools, tokenizer, parallel="blocks")
    return generate(policy, [prompt], 1, n, temperature, tokenizer.stop_ids, (), tokenizer, seed)[0]


def at_once(agent, chats, **how) -> list[Reply]:
    each = how.pop("seeds", [0] * len(chats))
    with ThreadPoolExecutor(len(chats)) as pool:
        waiting = [pool.submit(agent.reply, c, seed=s, **how) for c, s in zip(chats, each, strict=True)]
        return [w.result(60) for w in waiting]


def test_threads_at_once_get_the_greedy_text_of_one_at_a_time(world, agent):
    chats = [dialogue(n) for n in range(13)]
    got = at_once(agent, chats, tools=TOOLS, max_tokens=24)
    for reply, messages in zip(got, chats, strict=True):
        want = alone(world, messages, TOOLS)
        assert reply.ids == want.ids and reply.stopped == want.stopped
        assert reply.logprobs == pytest.approx(want.logprobs, abs=1e-5)
        assert reply.text == world[1].decode(want.ids[:-1] if want.stopped else want.ids)
    assert len({tuple(r.ids) for r in got}) > 2


def test_a_seed_fixes_the_sampled_text_whoever_shares_the_batch(agent):
    one = [agent.reply(dialogue(1), None, temperature=1.0, max_tokens=20, seed=s).ids for s in range(6)]
    agent.kept.clear()
    agent.sampler.release([r for r in agent.sampler.owner if r])
    many = at_once(agent, [dialogue(1)] * 6, tools=None, temperature=1.0, max_tokens=20, seeds=list(range(6)))
    assert [r.ids for r in many] == one and len(set(map(tuple, one))) == 6


def test_each_turn_has_its_own_temperature(world, agent):
    with ThreadPoolExecutor(4) as pool:
        hot = [pool.submit(agent.reply, dialogue(2), None, temperature=1.5, max_tokens=24, seed=s) for s in (1, 2)]
        cold = pool.submit(agent.reply, dialogue(2), None, max_tokens=24).result(60)
        hot = [h.result(60).ids for h in hot]
    assert cold.ids == alone(world, dialogue(2)).ids and cold.ids not in hot and hot[0] != hot[1]


def test_a_dialogue_that_goes_on_pays_for_its_new_tokens_only(world, agent):
    messages, before = dialogue(3), 0
    for turn in range(4):
        run = agent.sampler.tokens_run
        reply = agent.reply(messages, TOOLS, max_tokens=12)
        assert reply.ids == alone(world, messages, TOOLS, 12).ids
        # as the text of the turn comes back, its ids may be other ones; all before them is kept
        assert reply.cached_tokens >= before and (reply.cached_tokens > 100 or turn == 0)
        assert agent.sampler.tokens_run - run == reply.prompt_tokens - reply.cached_tokens + len(reply.ids) - 1
        before = reply.prompt_tokens - 1
        messages = messages + [{"role": "assistant", "content": reply.text}, {"role": "user", "content": f"it {turn}"}]


def test_a_dialogue_begins_with_a_copy_of_the_same_tools(world, agent):
    agent.reply(dialogue(1), TOOLS, max_tokens=5)
    kept = dict(agent.kept)
    got = agent.reply(dialogue(2), TOOLS, max_tokens=24)
    assert got.cached_tokens > 100 and got.ids == alone(world, dialogue(2), TOOLS).ids
    assert len(agent.kept) == 2 and next(iter(kept)) in agent.kept  # copied, not taken
    again = agent.reply(dialogue(1), TOOLS, max_tokens=5)
    assert again.prompt_tokens - again.cached_tokens == 1


def test_dialogues_outlive_the_loss_of_their_slots(world):
    agent, chats = Agent(*world, rows=2), [dialogue(n) for n in range(5)]
    try:
        for turn in range(3):
            for reply, messages in zip(at_once(agent, chats, tools=TOOLS, max_tokens=10), chats, strict=True):
                assert reply.ids == alone(world, messages, TOOLS, 10).ids
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": f"end {turn}"}]
    finally:
        agent.close()


def test_stops_are_left_out_and_a_first_call_is_kept(world, agent, monkeypatch):
    def reply(**how):
        script(monkeypatch, world[1], "hello <tool_call>{}</tool_call> the end")
        return agent.reply(dialogue(0), None, **({"max_tokens": 80} | how))
    assert reply(stop=("tool", "nothing")).text == "hello <"
    assert reply(one_call=True).text == "hello <tool_call>{}</tool_call>"
    whole = reply()
    assert whole.text == "hello <tool_call>{}</tool_call> the end" and whole.stopped and whole.malformed
    assert not reply(max_tokens=4).stopped
    prefixed = reply(prefix="<think>so</think>")
    assert prefixed.text.startswith("<think>so</think>hello") and prefixed.reasoning == "so"


def test_in_list_form_a_turn_ends_with_its_first_block(world, monkeypatch):
    agent = Agent(*world, rows=2, parallel="list")
    try:
        script(monkeypatch, world[1], "a <tool_call>[]</tool_call> b")
        assert agent.reply(dialogue(0), None, max_tokens=80).text == "a <tool_call>[]</tool_call>"
    finally:
        agent.close()


@pytest.mark.parametrize("stop", [(), ("the end.",), ("終わり",)])
def test_pieces_make_up_the_text(world, agent, monkeypatch, stop):
    text, pieces, ids, logprobs = "日本語 of the en 終わ the end. 🙂 and 終わり it", [], [], []
    script(monkeypatch, world[1], text)

    def take(piece, new_ids, new_logprobs):
        pieces.append(piece)
        ids.extend(new_ids)
        logprobs.extend(new_logprobs)
    got = agent.reply(dialogue(0), None, max_tokens=200, stop=stop, on_text=take)
    assert "".join(pieces) == got.text == (text.partition(stop[0])[0] if stop else text)
    assert ids == got.ids and logprobs == got.logprobs and len(pieces) > 5
    assert not any("\ufffd" in p for p in pieces)


def test_cancelling_ends_a_turn_early(agent, world, monkeypatch):
    script(monkeypatch, world[1], "hello " * 60)
    stop, seen = threading.Event(), []

    def take(piece, ids, logprobs):
        seen.append(piece)
        if len(seen) == 3:
            stop.set()
    got = agent.reply(dialogue(0), None, max_tokens=300, on_text=take, cancelled=stop)
    assert not got.stopped and len(seen) == 3


def test_a_temperature_that_is_next_to_nothing_is_greedy(world, agent):
    assert agent.reply(dialogue(1), None, temperature=1e-38, max_tokens=24).ids == alone(world, dialogue(1)).ids


def test_a_cancelled_turn_does_not_wait_for_a_row(world, monkeypatch):
    agent, stop, running, go = Agent(*world, rows=1), threading.Event(), threading.Event(), threading.Event()
    script(monkeypatch, world[1], "hello " * 100)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(agent.reply, dialogue(0), None, max_tokens=600,
                                on_text=lambda *_: (running.set(), go.wait(30)))
            assert running.wait(30)
            second = pool.submit(agent.reply, dialogue(1), None, cancelled=stop)
            stop.set()
            while agent.asked.empty() and not second.done():  # it has come to the worker, which stands in `on_text`
                pass
            assert not first.done()
            go.set()
            assert second.result(30).ids == [] and not second.result().stopped
            first.result(60)
    finally:
        agent.close()


def test_long_turns_behind_a_copy_are_fed_in_pieces(world, agent, monkeypatch):
    monkeypatch.setattr(agent_module, "ALONE", 2000)
    agent.reply(dialogue(1), TOOLS, max_tokens=5)
    long = [{"role": "user", "content": "hello " * 40}]
    fed, plain = [], agent.sampler.feed
    monkeypatch.setattr(agent.sampler, "feed", lambda rows, ids: (fed.append(len(ids[0])), plain(rows, ids)))
    got = agent.reply(long, TOOLS, max_tokens=24)
    assert len(fed) > 2 and sum(fed) == got.prompt_tokens - got.cached_tokens
    assert got.ids == alone(world, long, TOOLS).ids


@pytest.mark.parametrize("looks", [1, 16])
def test_tokens_end_with_the_stop_also_where_more_are_drawn(world, monkeypatch, looks):
    agent = Agent(*world, rows=2)
    agent.sampler.look_every = looks  # as on a GPU
    script(monkeypatch, world[1], "hello the end of it, the world " * 3)
    try:
        got = agent.reply(dialogue(0), None, max_tokens=60, stop=("end",))
        assert got.text == "hello the " and world[1].decode(got.ids) == "hello the end" and got.stopped
        assert len(got.logprobs) == len(got.ids)
        follow = [*dialogue(0), {"role": "assistant", "content": "hello the "}, {"role": "user", "content": "so"}]
        monkeypatch.undo()
        agent.sampler.look_every = 1
        assert agent.reply(follow, None, max_tokens=24).ids == alone(world, follow).ids
    finally:
        agent.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_agent_whose_worker_has_died_says_so(world):
    agent = Agent(*world, rows=2)

    def leave(*_):
        raise SystemExit
    with pytest.raises(RuntimeError, match="closed"):
        agent.reply(dialogue(0), None, max_tokens=5, on_text=leave)
    agent.worker.join(30)
    with pytest.raises(RuntimeError, match="closed"):
        agent.reply(dialogue(0), None)


def test_a_fault_ends_its_own_turn_only(world, agent):
    def fail(*_):
        raise OSError("gone")
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(agent.reply, dialogue(0), None, max_tokens=24, on_text=fail)
        good = pool.submit(agent.reply, dialogue(1), None, max_tokens=24)
        with pytest.raises(OSError, match="gone"):
            bad.result(60)
        assert good.result(60).ids == alone(world, dialogue(1)).ids
    for how, message in (({"max_tokens": 0}, "max_tokens"), ({"temperature": -1}, "temperature"),
                         ({"stop": ("",)}, "stop")):
        with pytest.raises(ValueError, match=message):
            agent.reply(dialogue(0), None, **how)
    with pytest.raises(ValueError, match="role"):
        agent.reply([{"role": "nobody", "content": ""}], None)
    with pytest.raises(PromptTooLong, match="700"):
        agent.reply([{"role": "user", "content": "hello " * 700}], None)
    near = [{"role": "user", "content": "hello " * 250}]
    room = 700 - agent.reply(near, None, max_tokens=1).prompt_tokens
    assert len(agent.reply(near, None, temperature=9.0).ids) <= room


def test_weights_that_are_not_finite_end_the_turns_that_run_and_no_later_ones(world):
    policy = make(world[1].size, max_position_embeddings=700)
    agent = Agent(policy, world[1], rows=2)
    try:
        good, weight = agent.reply(dialogue(0), TOOLS, max_tokens=5).ids, policy.model.norm.weight
        old = weight.clone()
        weight.fill_(float("nan"))
        agent.sampler.refresh()
        for _ in range(3):
            with pytest.raises(FloatingPointError, match="not finite"):
                agent.reply(dialogue(0), TOOLS, max_tokens=5)
        weight.copy_(old)
        agent.sampler.refresh()
        again = agent.reply(dialogue(0), TOOLS, max_tokens=5)
        assert again.ids == good and not again.cached_tokens  # what stood in the cache is not trusted
    finally:
        agent.close()
    with pytest.raises(RuntimeError, match="closed"):
        agent.reply(dialogue(0), None)


def script(monkeypatch, tokenizer, text: str) -> None:
    """Every row draws the tokens of `text`, then the end of the turn."""
    ids = iter([*tokenizer.encode(text), tokenizer.stop_ids[0]])

    def chosen(logits, uniforms, temperature):
        return torch.tensor([next(ids)] * len(logits)), torch.full((len(logits),), -0.5)
    monkeypatch.setattr(slots, "draw", chosen)


CALL, F = {"name": "f", "arguments": {"a": 1}}, '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("text, lenient, content, reasoning, calls, malformed", [
    ('hi <tool_call>\n' + F + '\n</tool_call> there', False, "hi  there", None, [CALL], False),
    ('<think>\nso\n</think>\n\nhi', False, "hi", "so", [], False),
    ('<think>\n<tool_call>' + F + '</tool_call></think>no', False, "no",
     '<tool_call>' + F + '</tool_call>', [], False),
    ('<think>cut off', False, "", "cut off", [], False),
    ('<tool_call>[' + F + ', {"name": "g"}]</tool_call>', False, "", None,
     [CALL, {"name": "g", "arguments": {}}], False),
    ('<tool_call>' + F + '</tool_call>\n<tool_call>oh</tool_call>', False, "", None, [CALL], True),
    ('<tool_call>{"name": "f", "argum', False, "", None, [], True),
    ('```json\n' + F + '\n```', False, '```json\n' + F + '\n```', None,
     [], False),
    ('```json\n' + F + '\n```', True, "```json\n\n```", None, [CALL], False),
    ('{"tool_calls": [{"name": "f", "parameters": {"a": 1}}, ' + F + ']} {x', True,
     '{"tool_calls": [, ]} {x', None, [CALL, CALL], False),
    ('<tool_call>{"name": 3}</tool_call>' + F, True,
     F, None, [], True),
    ('{"name": "f", "arguments": "__import__(1)"} {"name": "h"}', True,
     '{"name": "f", "arguments": "__import__(1)"} {"name": "h"}', None, [], False),
    ("{" * 3000, True, "{" * 3000, None, [], False),
])
def test_read_reply(text, lenient, content, reasoning, calls, malformed):
    assert read_reply(text, lenient) == (content, reasoning, calls, malformed)
