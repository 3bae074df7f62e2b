"""Proves: what the sampler stores is what the learner recomputes, and who shares a batch never matters.

Stored log-probabilities equal `learner.token_logprobs` to 1e-5 over groups, ragged prompts and temperatures; greedy
decoding from the cache equals greedy without one; a row's tokens depend on its stream alone, not on neighbours, order
or the number of rows; the drawn frequencies are the stored probabilities; stops end a row and stay in it; ids beyond
the tokenizer cannot be drawn; each token runs through the model once; new weights are seen at once.
"""
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from test_model import drawn

from slca import sampler as sampler_module
from slca import slots
from slca.engine import Engine
from slca.learner import pad, token_logprobs
from slca.model import ModelConfig, Policy
from slca.sampler import Sampler, generate, row_stream
from slca.slots import Completion, draw
from slca.tokenizer import train_bpe

V = 53
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11, 12], [3, 3, 3, 3, 3]]


def make(vocab: int = V, family: str = "qwen2", seed: int = 0, **shape) -> Policy:
    """A small policy whose distributions have likely and unlikely tokens."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return drawn(ModelConfig(family, vocab, **(sizes | shape)), seed).requires_grad_(False)


def recomputed(policy: Policy, prompts, completions, temperature: float, vocabulary: int = V) -> list[list[float]]:
    """Log-probabilities of the completions' tokens in one padded batch of the learner. prompts: one a completion."""
    ids = pad([p + c.ids for p, c in zip(prompts, completions, strict=True)])
    mask = pad([[0] * len(p) + [1] * len(c.ids) for p, c in zip(prompts, completions, strict=True)]) == 1
    logp = token_logprobs(policy, ids, mask, vocabulary, temperature)
    return [row[m].tolist() for row, m in zip(logp, mask, strict=True)]


def assert_scored(policy, prompts, completions, temperature, vocabulary=V):
    for c, want in zip(completions, recomputed(policy, prompts, completions, temperature, vocabulary), strict=True):
        assert len(c.ids) == len(c.logprobs) > 0
        assert c.logprobs == pytest.approx(want, abs=1e-5)


def assert_same(got: list[Completion], want: list[Completion]):
    assert [(c.ids, c.stopped) for c in got] == [(c.ids, c.stopped) for c in want]
    for a, b in zip(got, want, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.fixture
def scripted(monkeypatch):
    """`draw` takes the row's uniform numbers as the tokens to choose; everything else is as ever."""
    def chosen(logits, uniforms, temperature):
        logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
        return uniforms.long(), logp.gather(1, uniforms.long()[:, None]).squeeze(1)
    monkeypatch.setattr(slots, "draw", chosen)


def play(policy, prompt, scripts: list[list[int]], **how) -> list[Completion]:
    """Rows of one prompt that choose the tokens of their scripts."""
    width = max(map(len, scripts))
    sampler = Sampler(policy, len(scripts), len(prompt) + width, **how)
    rows = sampler.admit([prompt], [[np.array(s + [0] * (width - len(s)), np.float32) for s in scripts]])[0]
    sampler.decode(rows, [len(s) for s in scripts])
    return [row.fresh for row in rows]


# ---- what is stored

@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_stored_logprobs_are_the_learners(family, temperature):
    policy = make(family=family)
    got = generate(policy, PROMPTS, 3, 14, temperature, stop_ids=(7, 30), seed=4)
    assert len({len(c.ids) for c in got}) > 2 and {c.stopped for c in got} == {True, False}
    assert_scored(policy, [p for p in PROMPTS for _ in range(3)], got, temperature)


def test_groups_are_adjacent_and_members_differ():
    policy = make()
    got = generate(policy, PROMPTS, 3, 8, seed=4)
    assert len(got) == 15 and len({tuple(c.ids) for c in got}) == 15
    wrong = recomputed(policy, PROMPTS * 3, got, 1.0)  # the other order does not fit the stored values
    assert max(abs(a - b) for c, w in zip(got, wrong, strict=True) for a, b in zip(c.logprobs, w, strict=True)) > 0.1


def test_greedy_from_the_cache_is_greedy_without():
    policy = make(family="qwen3")
    got = generate(policy, PROMPTS, 1, 45, temperature=0)
    for prompt, c in zip(PROMPTS, got, strict=True):
        ids = list(prompt)
        for _ in range(45):
            ids.append(int(policy(torch.tensor([ids]))[0, -1].argmax()))
        assert c.ids == ids[len(prompt):] and not c.stopped
    assert len({i for c in got for i in c.ids}) > 5  # not one token for ever
    assert_scored(policy, PROMPTS, got, 1.0)  # log-probabilities of the untempered distribution


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_drawn_frequencies_are_the_stored_probabilities(temperature):
    """4,000 draws of a policy with four tokens; chi-square with 3 degrees of freedom under its 99.9 % point."""
    policy = make(4, seed=3)
    got = generate(policy, [[2, 1]], 4000, 1, temperature, seed=11)
    p = {c.ids[0]: np.exp(c.logprobs[0]) for c in got}
    assert sum(p.values()) == pytest.approx(1, abs=1e-5) and min(p.values()) > 0.02
    counts = Counter(c.ids[0] for c in got)
    chi2 = sum((counts[i] - 4000 * p[i]) ** 2 / (4000 * p[i]) for i in range(4))
    assert chi2 < 16.3
    other = torch.softmax(policy(torch.tensor([[2, 1]]))[0, -1], -1)  # and the untempered ones do not fit
    assert sum((counts[i] - 4000 * q) ** 2 / (4000 * q) for i, q in enumerate(other.tolist())) > 16.3


BELOW_1 = float(np.nextafter(np.float32(1), np.float32(0)))
DRAWS = [  # probabilities, uniform number, token
    ([0, 0.5, 0.5, 0], 0.0, 1), ([0, 0.5, 0.5, 0], BELOW_1, 2), ([0, 0, 0, 1], 0.0, 3), ([1, 0, 0, 0], BELOW_1, 0),
    ([0, 1, 0, 0], 0.5, 1), ([0.25, 0.25, 0.5, 0], 0.25, 1), ([0.25, 0.25, 0.5, 0], 0.2499, 0),
    ([0.25, 0.25, 0.5, 0], 0.5, 2), ([0.5, 0, 0, 0.5], 0.5, 3), ([0.5, 0, 0, 0.5], 0.4999, 0),
]


@pytest.mark.parametrize("case", range(len(DRAWS)))
def test_draw_by_hand(case):
    p, u, want = DRAWS[case]
    token, logp = draw(torch.tensor([p]).log(), torch.tensor([u]), 1.0)
    assert int(token) == want and float(logp) == pytest.approx(np.log(p[want]), abs=1e-6)


@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_draw_at_the_ends_of_a_large_vocabulary(scale):
    """Where float32 sums end a little off 1, the ends still give a token, and never one of probability 0."""
    logits = scale * torch.randn(64, 30_000, generator=torch.Generator().manual_seed(0))
    logits[:, :100], logits[:, -100:] = float("-inf"), float("-inf")
    for u in (0.0, BELOW_1):
        token, logp = draw(logits, torch.full((64,), u), 1.0)
        assert logp.isfinite().all() and (token >= 100).all() and (token < 29_900).all()
    assert (draw(logits, torch.zeros(64), 0)[0] == logits.argmax(-1)).all()


def test_draw_tempers():
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    for t in (0.5, 1.0, 2.0):
        token, logp = draw(logits, torch.tensor([0.5]), t)
        assert float(logp) == pytest.approx(float(torch.log_softmax(logits / t, -1)[0, int(token)]), abs=1e-6)
    greedy = draw(logits, torch.tensor([0.0]), 0)[1]
    assert float(greedy) == pytest.approx(float(logits.log_softmax(-1)[0, 2]), abs=1e-6)


# ---- who shares a batch

def test_a_row_does_not_know_its_neighbours():
    policy = make()
    together = generate(policy, PROMPTS, 2, 20, 1.0, (7,), seed=9)
    for p, prompt in enumerate(PROMPTS):
        strangers = [[40 + i] * (1 + i) for i in range(p)] + [prompt]  # the stream's key holds the prompt's number
        assert_same(generate(policy, strangers, 1, 20, 1.0, (7,), seed=9)[-1:], together[2 * p:2 * p + 1])
    assert [c.ids for c in generate(policy, PROMPTS, 2, 20, 1.0, (7,), seed=10)] != [c.ids for c in together]


def test_order_of_the_prompts_changes_only_the_order():
    policy = make()

    def run(order):
        sampler = Sampler(policy, 10, 40, stop_ids=(7,))
        groups = sampler.admit([PROMPTS[p] for p in order],
                               [[row_stream(1, p, m).random(20, np.float32) for m in range(2)] for p in order])
        sampler.decode([row for group in groups for row in group], [20] * 10)
        return {p: [row.fresh for row in group] for p, group in zip(order, groups, strict=True)}

    a, b = run([0, 1, 2, 3, 4]), run([3, 0, 4, 2, 1])
    for p in range(5):
        assert_same(a[p], b[p])


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 6])
def test_refill_gives_what_all_at_once_gives(max_rows):
    policy, prompts = make(), [*PROMPTS, [2, 4], [50] * 7, [8]]
    want = generate(policy, prompts, 2, 24, 1.0, (7, 30, 12), seed=2)
    assert len({len(c.ids) for c in want}) > 5
    assert_same(generate(policy, prompts, 2, 24, 1.0, (7, 30, 12), seed=2, max_rows=max_rows), want)


def test_rows_left_in_mid_turn_go_on(scripted):
    """Decoding ends once `leave_at` rows stopped; the others continue as if nothing had been."""
    policy, scripts = make(), [[4, 7], [5, 6, 5, 6, 7], [1, 2, 3, 4, 5, 6]]
    want = play(policy, PROMPTS[0], scripts, stop_ids=(7,))
    sampler = Sampler(policy, 3, 9, stop_ids=(7,))
    rows = sampler.admit([PROMPTS[0]], [[np.array(s + [0] * 6, np.float32)[:6] for s in scripts]])[0]
    assert sampler.decode(rows, [6, 6, 6], leave_at=1) == [rows[0]]
    sampler.release([rows[0]])
    assert sampler.free == 1 and [len(row.fresh.ids) for row in rows] == [2, 2, 2]
    assert set(sampler.decode(rows[1:], [4, 4])) == {rows[1], rows[2]}
    assert_same([row.fresh for row in rows], want)


# ---- the end of a row

STOPS = [([3, 4, 40, 5], [3, 4, 40], True), ([3, 41, 5, 5], [3, 41], True), ([40, 5, 5, 5], [40], True),
         ([3, 4, 5, 6], [3, 4, 5, 6], False), ([3, 4, 5, 41], [3, 4, 5, 41], True)]


def test_each_stop_ends_its_row_and_is_scored(scripted):
    policy = make()
    got = play(policy, PROMPTS[2], [script for script, _, _ in STOPS], stop_ids=(40, 41))
    assert [(c.ids, c.stopped) for c in got] == [(ids, stopped) for _, ids, stopped in STOPS]
    assert_scored(policy, [PROMPTS[2]] * 5, got, 1.0)


def test_finished_rows_leave_the_batch(scripted, monkeypatch):
    policy, sizes, step = make(), [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, ids, *a: sizes.append(len(ids)) or step(self, ids, *a))
    play(policy, PROMPTS[0], [[40], [3, 40], [3, 3, 3, 40], [3, 3, 3, 3, 3]], stop_ids=(40,))
    assert sizes == [3, 2, 2, 1]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["hello world, the end of it"] * 3, 300, ("<|im_end|>",), ("</tool_call>",))


@pytest.mark.parametrize("text, stop, kept", [
    ("ab</end>cd", "</end>", "ab</end>"), ("</end>", "</end>", "</end>"), ("a</en</end>d>", "</end>", "a</en</end>"),
    ("ab</end cd", "</end>", None), ("x 日本語の終わり y", "日本語の終わり", "x 日本語の終わり"),
    ("a</tool_call>b", "</tool_call>", "a</tool_call>"),
])
def test_stop_strings(scripted, tokenizer, text, stop, kept):
    ids, policy = tokenizer.encode(text), make(tokenizer.size)
    got = play(policy, [5], [ids], stop_strings=(stop,), tokenizer=tokenizer)[0]
    assert got.stopped == (kept is not None) and tokenizer.decode(got.ids) == (kept or text)
    assert got.ids == ids[:len(got.ids)]


def test_stop_string_ends_a_row_however_it_is_cut_into_tokens(scripted, tokenizer):
    """`</tool_call>` is one entry, but the policy may spell it; a letter is one entry, but stands inside others too."""
    spelled = tokenizer.encode_untrusted("a</tool_call>b")
    assert len(tokenizer.encode("a</tool_call>b")) == 3 < len(spelled)
    got = play(make(tokenizer.size), [5], [spelled], stop_strings=("</tool_call>",), tokenizer=tokenizer)[0]
    assert got.stopped and tokenizer.decode(got.ids) == "a</tool_call>"
    ids = tokenizer.encode("a hello b")
    inside = next(i for i in ids if "e" in tokenizer.decode([i]) and len(tokenizer.decode([i])) > 1)
    got = play(make(tokenizer.size), [5], [ids], stop_strings=("e",), tokenizer=tokenizer)[0]
    assert tokenizer.token_to_id("e") is not None and got.stopped and got.ids[-1] == inside


def test_streams_of_keys_that_numpy_pads_alike_differ():
    assert row_stream(0, 5, 3).random() != row_stream(0, 5, 3, 0).random()
    assert row_stream(0, 5, 3).random() == row_stream(0, 5, 3).random()


def test_stop_string_of_the_last_turn_does_not_end_the_next(scripted, tokenizer):
    script = tokenizer.encode("a</end>") + tokenizer.encode("bc</end>")
    sampler = Sampler(make(tokenizer.size), 1, 60, stop_strings=("</end>",), tokenizer=tokenizer)
    row = sampler.admit([[5]], [[np.array(script, np.float32)]])[0][0]
    for text in ("a</end>", "bc</end>"):
        sampler.decode([row], [len(script) - row.drawn])
        assert row.fresh.stopped and tokenizer.decode(row.fresh.ids) == text
        sampler.feed([row], [[9]])


# ---- ids the tokenizer does not know

def test_ids_beyond_the_tokenizer_are_never_drawn(tokenizer):
    policy, draw = make(tokenizer.size + 11, tie_word_embeddings=False), torch.Generator().manual_seed(0)
    with torch.no_grad():  # one of the two is the likeliest token everywhere
        policy.lm_head.weight[-2:] = 100 * torch.tensor([[1.0], [-1.0]]) * torch.randn(32, generator=draw)
    size, prompts = tokenizer.size, [[5, 6], [7], [8, 9, 10]]
    free = generate(policy, prompts, 2, 12, temperature=0)
    assert min(i for c in free for i in c.ids) >= size  # without a tokenizer nothing else comes
    for temperature in (0, 1.0, 1.3):
        got = generate(policy, prompts, 2, 12, temperature, tokenizer=tokenizer)
        assert max(i for c in got for i in c.ids) < size
        assert_scored(policy, [p for p in prompts for _ in range(2)], got, temperature or 1.0, size)
        assert all(sum(c.logprobs) > -12 * 12 for c in got)  # of the whole vocabulary they would be near -100 each


# ---- the work done, and the weights it is done with

def test_each_token_runs_once(scripted):
    """Over admission, decoding and a fed turn: prompts once a group, and all but a row's last token once."""
    policy, draws = make(), [[40, 6, 6, 6, 40], [4, 5, 40, 6, 40]]  # the first to stop stands in front
    sampler = Sampler(policy, 4, 40, stop_ids=(40,))
    rows = sampler.admit([[1, 2, 3]], [[np.array(s, np.float32) for s in draws]])[0]
    assert sampler.tokens_run == 3
    sampler.decode(rows, [5, 5])
    assert sampler.tokens_run == 3 + 0 + 2
    first, fed = [row.fresh for row in rows], [[10, 11], [12, 13, 14, 15]]
    sampler.feed(rows, fed)
    assert sampler.tokens_run == 5 + (1 + 2) + (1 + 4)
    sampler.decode(rows, [4, 2])
    assert sampler.tokens_run == 13 + 3 + 1
    for row, turn, new in zip(rows, first, fed, strict=True):
        assert_scored(policy, [[1, 2, 3] + turn.ids + new], [row.fresh], 1.0)


def test_prefill_in_several_calls_is_the_same(monkeypatch):
    policy = make()
    want = generate(policy, PROMPTS, 2, 10, seed=3)
    monkeypatch.setattr(sampler_module, "PREFILL_TOKENS", 6)
    assert_same(generate(policy, PROMPTS, 2, 10, seed=3), want)


def test_new_weights_are_seen_after_refresh():
    policy, other = make(seed=0), make(seed=1)
    streams = [[row_stream(0, p, 0).random(10, np.float32)] for p in range(2)]
    sampler, found = Sampler(policy, 2, 20), []
    for _ in range(2):
        rows = [group[0] for group in sampler.admit(PROMPTS[:2], streams)]
        sampler.decode(rows, [10, 10])
        sampler.release(rows)
        found.append([row.fresh for row in rows])
        policy.load_state_dict(other.state_dict())  # in place, as an optimiser does
        sampler.refresh()
    assert_same(found[1], generate(other, PROMPTS[:2], 1, 10))
    assert_same(generate(policy, PROMPTS[:2], 1, 10), found[1])
    assert [c.ids for c in found[0]] != [c.ids for c in found[1]]


# ---- errors

@pytest.mark.parametrize("change, message", [
    (dict(temperature=-0.1), "temperature -0.1"), (dict(temperature=float("nan")), "temperature nan"),
    (dict(temperature=float("inf")), "temperature inf"), (dict(stop_strings=("x",)), "stop_strings need a tokenizer"),
    (dict(stop_strings=("x", "")), "a stop string is empty"),
    (dict(group_size=0), "group_size 0"), (dict(max_new_tokens=0), "max_new_tokens 0"),
    (dict(prompts=[[1], []]), "at least one token"),
])
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        generate(make(), **(dict(prompts=[[1]], max_new_tokens=2) | change))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_weights_that_are_not_finite_are_named(temperature):
    policy = make()
    policy.model.norm.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="weights are not"):
        generate(policy, [[1, 2]], 2, 3, temperature)


def test_no_prompts_no_completions():
    assert generate(make(), [], 2, 4) == []


def test_rows_and_draws_are_limited():
    sampler = Sampler(make(), 2, 20)
    with pytest.raises(ValueError, match="3 rows asked for, 2 are free"):
        sampler.admit([[1], [2], [3]], [[np.zeros(4, np.float32)]] * 3)
    rows = sampler.admit([[1]], [[np.zeros(4, np.float32)] * 2])[0]
    with pytest.raises(ValueError, match="1 rows asked for, 0 are free"):
        sampler.admit([[1]], [[np.zeros(4, np.float32)]])
    with pytest.raises(ValueError, match="may draw 4 tokens, 5 are asked for"):
        sampler.decode(rows, [5, 4])
