"""Proves: the decoding engine computes what `Policy.hidden` does, whatever way the tokens come.

Prefill, ragged appends behind the cursor, steps, shared and unshared prompts side by side agree to 1e-5 for Qwen2,
Qwen3 and Llama with grouped queries; columns past a row's length change no bit; the cache grows without losing any; a
bf16 engine stays near the float32 one; and the host looking at the tokens only every few steps, with the batch rounded
up (the way of a GPU), gives the same rows, token for token. (CUDA graphs themselves need a GPU and are not run here.)
"""
from __future__ import annotations

import numpy as np
import pytest
import torch
from test_model import EVERY_MODEL, make, tokens
from test_sampler import PROMPTS, assert_same
from test_sampler import make as small

from slca.engine import HIDDEN, Cache, Engine, merged, partial
from slca.sampler import Sampler, generate, row_stream
from slca.slots import Completion


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def scripted(sampler: Sampler, rows: list, script: torch.Tensor) -> None:
    """Make the rows' next step run these tokens, int64 [rows]."""
    for row, token in zip(rows, script, strict=True):
        sampler.token[row.slot] = token
    sampler._run(*sampler._sizes(rows, 1))
    for row in rows:
        row.length += 1


GROUPINGS = {"alone": [1, 1, 1], "groups": [2, 3], "mixed": [2, 1, 3], "one group": [4]}


@EVERY_MODEL
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_prefill_steps_and_tool_turns_are_the_plain_forward_pass(family, grouping):
    """Ragged prompts, two steps, an append of ragged lengths, three steps; rows leave and prompts move in between."""
    policy, sizes = make(family), GROUPINGS[grouping]
    sampler, draw = Sampler(policy, 6, 300), torch.Generator().manual_seed(5)
    for cache in (sampler.cache, sampler.prompts):
        cache.reserve(7, 300, 300)
        cache.kv.copy_(torch.randn(cache.kv.shape, generator=draw))  # leftovers of rows that were there before
    prompts = [tokens(n, seed=n).tolist() for n in (40, 3, 270)[:len(sizes)]]
    groups = sampler.admit(prompts, [[np.zeros(9, np.float32)] * n for n in sizes])
    rows = [row for group in groups for row in group]
    ids = {row: list(p) for p, group in zip(prompts, groups, strict=True) for row in group}

    def check() -> None:
        for row in rows:
            close(sampler.state[row.slot], policy.hidden(torch.tensor([ids[row]]))[0, -1])
    check()

    def steps(count: int) -> None:
        for _ in range(count):
            live = sampler._to_front(rows)
            new = torch.randint(0, 61, (len(live),), generator=draw)
            scripted(sampler, live, new)
            for row, i in zip(live, new.tolist(), strict=True):
                ids[row].append(i)
            check()
    steps(2)
    new = [tokens(n + 1, seed=90 + n).tolist() for n in range(len(rows))]
    sampler.feed(rows, new)
    for row, more in zip(rows, new, strict=True):
        ids[row] += more
    check()
    if len(rows) > 3:  # the first leaves, and perhaps its prompt with it
        sampler.release(rows[:2])
        rows = rows[2:]
    steps(3)


@EVERY_MODEL
def test_columns_past_the_length_change_no_bit(family):
    policy, results = make(family), []
    for value in (0.0, 1e4):
        sampler = Sampler(policy, 4, 40)
        for cache in (sampler.cache, sampler.prompts):
            cache.reserve(5, 64, 64)
            cache.kv.fill_(value)
        groups = sampler.admit([[5, 6, 7], [9] * 11], [[np.zeros(9, np.float32)] * n for n in (1, 3)])
        rows = sampler._to_front([row for group in groups for row in group])
        scripted(sampler, rows, torch.tensor([1, 2, 3, 4]))
        results.append(sampler.state.clone())
    assert torch.equal(*results)


def test_the_cache_grows_and_keeps_what_it_holds():
    policy = small()
    want = generate(policy, PROMPTS, 2, 70, seed=1)
    sampler = Sampler(policy, 10, 120)
    groups = sampler.admit(PROMPTS, [[row_stream(1, p, m).random(70, np.float32) for m in range(2)] for p in range(5)])
    rows, columns = [row for group in groups for row in group], []
    for _ in range(7):
        sampler.decode(rows, [10] * 10)
        columns.append(sampler.cache.kv.shape[4])
        if len(columns) < 7:
            for row in rows:  # the turn goes on where it was
                row.fresh, kept = Completion([], [], False), row.fresh
                row.turns = [*getattr(row, "turns", []), kept]
                row.fresh.ids = kept.ids[-1:]
            sampler.feed(rows, [[]] * 10)
    assert columns[-1] > columns[0]
    ids = [[i for turn in [*row.turns, row.fresh] for i in turn.ids] for row in rows]
    assert ids == [c.ids for c in want]


@pytest.mark.parametrize("members", [1, 2])
def test_a_full_cache_is_refused(members):
    sampler = Sampler(small(), 2, 10)
    with pytest.raises(ValueError, match="holds 10 tokens a row, 11 are needed"):
        sampler.admit([[1] * 11], [[np.zeros(4, np.float32)] * members])
    rows = sampler.admit([[1] * 8], [[np.zeros(4, np.float32)] * members])[0]
    with pytest.raises(ValueError, match="holds 10 tokens a row, 11 are needed"):
        sampler.decode(rows, [4] * members)
    with pytest.raises(ValueError, match="holds 10 tokens a row, 11 are needed"):
        sampler.feed(rows, [[5, 6, 7]] * members)
    assert [row.length + row.drawn for row in rows] == [8 if members == 1 else 0] * members
    sampler.decode(rows, [3] * members)  # full to the brim is fine: the last token is not run
    assert [len(row.fresh.ids) for row in rows] == [3] * members


def test_partial_attention_merges_to_the_whole():
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, n, 8, generator=draw) for n in (4, 9, 9))
    bias = torch.zeros(2, 1, 1, 9)
    bias[0, ..., 5:] = HIDDEN
    want = torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v
    for cut in (1, 5, 8):  # with 5, the second part of row 0 has nothing to see
        parts = [partial(q, k[:, :, s].transpose(-1, -2), v[:, :, s], bias[..., s])
                 for s in (slice(0, cut), slice(cut, 9))]
        close(merged(*parts), want)
        close(merged(*parts[::-1]), want)


@EVERY_MODEL
def test_a_bf16_engine_stays_near_the_policy(family):
    policy = make(family)
    prompts = [tokens(20, seed=3).tolist(), tokens(7, seed=4).tolist()]
    sampler = Sampler(policy, 4, 60, dtype=torch.bfloat16)
    groups = sampler.admit(prompts, [[row_stream(0, p, m).random(20, np.float32) for m in range(2)] for p in range(2)])
    rows = [row for group in groups for row in group]
    sampler.decode(rows, [20] * 4)
    assert sampler.cache.kv.dtype == sampler.prompts.kv.dtype == sampler.state.dtype == torch.bfloat16
    for row, prompt in zip(rows, [p for p in prompts for _ in range(2)], strict=True):
        ids = torch.tensor([prompt + row.fresh.ids])
        logp = torch.log_softmax(policy(ids)[0, len(prompt) - 1:-1], -1).gather(1, ids[0, len(prompt):, None])[:, 0]
        assert 1e-6 < (torch.tensor(row.fresh.logprobs) - logp).abs().max() < 0.2


@pytest.mark.parametrize("group_size, max_rows", [(1, 128), (3, 128), (3, 6), (2, 5)])
@pytest.mark.parametrize("look_every, row_step", [(5, 1), (1, 4), (16, 8)])
def test_looking_seldom_gives_the_same_rows(monkeypatch, look_every, row_step, group_size, max_rows):
    """Rows that ran on behind their stop are cut back, rows that only fill the batch up come out unharmed."""
    policy, prompts, plain = small(), [*PROMPTS, [2, 4], [50] * 7], Sampler.__init__
    how = dict(temperature=1.0, stop_ids=(3, 7, 12, 20, 30, 41), seed=2, max_rows=max_rows)
    want = generate(policy, prompts, group_size, 24, **how)
    assert len({len(c.ids) for c in want}) > 3

    def init(self, *a, **k):
        plain(self, *a, **k)
        self.look_every, self.row_step = look_every, row_step
    monkeypatch.setattr(Sampler, "__init__", init)
    assert_same(generate(policy, prompts, group_size, 24, **how), want)


def test_a_row_left_out_of_a_call_is_not_touched():
    """With the batch rounded up, a row that waits fills it up for a while and then goes on as if nothing had been."""
    found = []
    for how in ((1, 1), (16, 8)):
        sampler = Sampler(small(), 8, 60)
        sampler.look_every, sampler.row_step = how
        a, b = sampler.admit([[5, 6, 7]], [[row_stream(0, 0, m).random(40, np.float32) for m in range(2)]])[0]
        sampler.decode([a], [40])
        sampler.decode([b], [40])
        found.append([a.fresh, b.fresh])
    assert_same(found[1], found[0])


def test_a_float64_policy_can_be_sampled():
    policy = small().double()
    assert [len(c.ids) for c in generate(policy, PROMPTS, 2, 5)] == [5] * 10


def test_few_rows_and_many_rows_go_through_equal_products():
    policy = small()
    engine = Engine(policy, 20)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    for matrix, want in ((engine.head, x @ policy.head.T), (engine.layers[0].out,
                                                           policy.model.layers[0].self_attn.o_proj(x))):
        for n in (1, 3, 4, 9):
            close(matrix(x[:n]), want[:n])


def test_a_turn_that_has_ended_is_fed_or_released():
    """Its last token is drawn and not yet run: to decode on would leave it out of the cache."""
    sampler = Sampler(small(), 2, 60)
    stream = row_stream(0, 0, 0).random(40, np.float32)
    row = sampler.admit([[5, 6, 7]], [[stream]])[0][0]
    with pytest.raises(ValueError, match="fed no token"):
        sampler.feed([row], [[]])
    sampler.decode([row], [4])
    with pytest.raises(ValueError, match="fed or released"):
        sampler.decode([row], [4])
    sampler.feed([row], [[]])  # runs the drawn token alone
    assert row.length == 3 + 4
    sampler.decode([row], [4])
    assert sampler.tokens_run == 3 + 4 + 3


def test_the_cache_grows_to_what_the_rows_may_hold_and_no_further():
    sampler = Sampler(small(), 2, 100)
    sampler.admit([[5] * 80], [[row_stream(0, 0, 0).random(20, np.float32)]])
    row = next(row for row in sampler.owner if row)
    sampler.decode([row], [20])
    assert 100 <= sampler.cache.kv.shape[4] <= 192


def test_padding_of_an_append_may_reach_past_the_cache():
    """A long row and a short one are fed 2 and 20 tokens: padded, the long one's would lie in columns 58 to 89."""
    policy = make()
    engine, cache = Engine(policy, 128), Cache(policy.config, torch.float32, torch.device("cpu"))
    cache.reserve(2, 65, 65)
    prompts, new = [tokens(58, seed=1), tokens(7, seed=2)], [tokens(2, seed=3), tokens(20, seed=4)]
    for slot, ids in enumerate(prompts):
        engine.prefill(ids[None], cache, torch.tensor([slot]))
    batch = torch.zeros(2, 32, dtype=torch.long)
    for row, ids in zip(batch, new, strict=True):
        row[:len(ids)] = ids
    none = torch.zeros(2, dtype=torch.long)
    got = engine.extend(batch, cache, torch.arange(2), torch.tensor([58, 7]), 64, none, cache, none, 0)
    for i, n in enumerate((2, 20)):
        close(got[i, :n], policy.hidden(torch.cat([prompts[i], new[i]])[None])[0, -n:])


def test_a_sampler_that_rested_samples_the_same():
    """Memory given back between two rollouts: the same rows with it as without."""
    policy, found = small(), []
    for rests in (False, True):
        sampler = Sampler(policy, 4, 40)
        for step in range(2):
            sampler.refresh()
            rows = sampler.admit([[5, 6, 7], [9, 8]], [[row_stream(step, p, m).random(12, np.float32) for m in (0, 1)]
                                                       for p in (0, 1)])
            rows = [row for group in rows for row in group]
            sampler.decode(rows, [12] * 4)
            sampler.release(rows)
            found += [row.fresh.ids for row in rows]
            if rests:
                sampler.rest()
                assert sampler.cache.kv.numel() == sampler.prompts.kv.numel() == 0 and not sampler.engine.layers
    assert found[:8] == found[8:]


def test_rows_cut_back_go_on_in_their_next_turns():
    """Looking seldom over several turns: what ran on behind a stop has left no trace in the row's stream or cache."""
    stops, found = (3, 7, 12, 20, 30, 41), []
    for how in ((1, 1), (5, 1), (16, 8)):
        sampler = Sampler(small(), 8, 200, stop_ids=stops)
        sampler.look_every, sampler.row_step = how
        prompts = [[5, 6, 7], [9, 8]]
        streams = [[row_stream(0, p, m).random(80, np.float32) for m in range(3)] for p in range(2)]
        rows, turns = [row for group in sampler.admit(prompts, streams) for row in group], []
        for turn in range(3):
            sampler.decode(rows, [20] * 6)
            turns += [row.fresh for row in rows]
            sampler.feed(rows, [[9, 8, turn]] * 6)
        found.append(turns)
    assert len({len(c.ids) for c in found[0]}) > 3
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
