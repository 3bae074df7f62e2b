"""The embedded world: a task is fixed by (seed, split, number) alone, gold and reference answer are right by the
simulator, HierR and the judge, the splits share no value and no combination of names, the kinds and the flaws of the
demonstrations come at their stated rates, and its tokenizer writes a value the same way wherever it stands.
"""
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from slca import chat
from slca.data.families import BY_NAME, CHAT, FAMILIES
from slca.data.vocabulary import world_tokenizer
from slca.data.world import KINDS, OMIT_FAMILIES, REPEAT_FAMILIES, SPLITS, World
from slca.judge import RulesJudge, names, score_episodes
from slca.rollout import Episode
from slca.settings import Config, Flaws, RewardConfig
from slca.sft import curriculum_task
from slca.simulator import Simulator, check_call, is_error, phi_check

ROOT = Path(__file__).parent.parent
SINGLE = ("single", "history")


def as_json(tasks) -> list[dict]:
    return [dataclasses.asdict(t) for t in tasks]


def made(task) -> list[list[dict]]:
    """The calls of a demonstration, by turn."""
    return [m["tool_calls"] for m in task.demonstration if m.get("tool_calls")]


def replay(task, messages) -> Episode:
    """A demonstration's messages as the turns of an episode, parallel calls as one list."""
    turns = []
    for m in messages:
        if m["role"] == "tool":
            turns.append(("tool", m["content"]))
        else:
            calls = m.get("tool_calls") or []
            block = json.dumps(calls if len(calls) > 1 else calls[0]) if calls else ""
            turns.append(("assistant", m["content"] + (f"<tool_call>\n{block}\n</tool_call>" if calls else "")))
    return Episode(task, 0, 0, [], 0, [], [], turns=turns)


def facts_of(text: str, family) -> list[str]:
    """The results that an observation carries: JSON values, or what fills the sentence of an open tool."""
    if family.mode != "open":
        return [str(v) for v in json.loads(text).values()]
    pattern = re.escape(family.text)
    for key, _ in family.results:
        pattern = pattern.replace(re.escape(f"{{{key}}}"), f"(?P<{key}>.+)", 1)
    pattern = re.sub(r"\\\{\w+\\\}", ".+", pattern)
    return list(re.fullmatch(pattern, text).groupdict().values())


@pytest.fixture(scope="module")
def flawed():
    """4,000 training tasks with the default flaws."""
    return World("train", 3, flaws=Flaws()).tasks(4000)


@pytest.fixture(scope="module")
def splits():
    return {split: World(split, 0).tasks(2000 if split == "train" else 1000) for split in SPLITS}


# ---- families

def test_families():
    assert len(FAMILIES) >= 12 and {f.mode for f in FAMILIES.values()} == {"deterministic", "query", "open"}
    every = [name for f in FAMILIES.values() for name in f.names]
    assert len(every) == len(set(every)) >= 3 * len(FAMILIES) and BY_NAME.keys() == set(every)
    for key, f in FAMILIES.items():
        assert f.key == key and len(f.asks) >= 2 and len(set(f.asks)) == len(f.asks)
        synonyms = [s for group, _ in f.args for s in group]
        assert len(synonyms) == len(set(synonyms)) and all(len(group) >= 2 for group, _ in f.args)
        for i in range(len(f.args)):
            called = f.argument_names(i)
            assert len(called) == len(set(called)) and set(f.args[i][0]) < set(called)
        texts = (*f.asks, f.more, f.text) if f.text else (*f.asks, f.more)
        for text in texts:  # every argument is said, so that a call can be copied from it
            assert all(f"{{{i}}}" in text for i in range(len(f.args))), (key, text)
        assert all(f"{{{name}}}" in f.reply for name, _ in f.results)
        if f.source:  # a look-up that takes and gives one value of the right kind
            source = FAMILIES[f.source]
            assert len(source.args) == len(source.results) == 1 and source.results[0][1] == f.args[0][1]
            assert f.chained and all(f"{{{i}}}" in f.chained for i in range(len(f.args)))
    assert {*OMIT_FAMILIES, *REPEAT_FAMILIES} <= FAMILIES.keys() and not {*OMIT_FAMILIES} & {*REPEAT_FAMILIES}


# ---- purity

def test_task_is_pure():
    """In any order, from another World, in another process with another hash seed; other seeds and splits differ."""
    indices, flaws = [7, 0, 911, 3, 45, 7, 20, 21, 22, 23], Flaws()
    world = World("heldout", 5, flaws=flaws)
    want = as_json(world.task(i) for i in indices)
    assert as_json(World("heldout", 5, flaws=flaws).tasks(46, start=0))[45] == want[4] and want[0] == want[5]
    assert as_json(World("heldout", 5, flaws=flaws).task(i) for i in reversed(indices))[::-1] == want
    code = ("import sys, json, dataclasses\nfrom slca.data.world import World\nfrom slca.settings import Flaws\n"
            f"w = World('heldout', 5, flaws=Flaws())\n"
            f"print(json.dumps([dataclasses.asdict(w.task(i)) for i in {indices}]))")
    hash_seed = "77" if os.environ.get("PYTHONHASHSEED") != "77" else "78"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."})
    assert json.loads(run.stdout) == want
    for other in (World("heldout", 6, flaws=flaws), World("train", 5, flaws=flaws)):
        assert all(a != b for a, b in zip(as_json(other.task(i) for i in indices), want, strict=True))
    kinds = [[t.subset for t in World(split, seed).tasks(100)] for split in SPLITS for seed in (5, 6)]
    assert len({tuple(k) for k in kinds}) == 6  # every stream is its own
    ids = {t.id for split in SPLITS for seed in (0, 1) for t in World(split, seed).tasks(20)}
    assert len(ids) == 20 * 2 * len(SPLITS)


def test_flaws_change_only_the_demonstration():
    for clean, flawed in zip(World("train", 1).tasks(200), World("train", 1, flaws=Flaws()).tasks(200), strict=True):
        assert dataclasses.replace(clean, demonstration=[]) == dataclasses.replace(flawed, demonstration=[])


def test_another_simulator_seed():
    """The world's results follow the simulator's seed: gold steps of one call stay, facts move."""
    first, second = (World("train", 1, simulator_seed=s).tasks(150) for s in (0, 1))
    moved = [a.facts != b.facts for a, b in zip(first, second, strict=True) if a.subset != "no_call"]
    assert sum(moved) > len(moved) * .6
    for t in second:
        for step in t.gold_calls:
            assert all(phi_check(c, t.tools, Simulator(seed=1).respond(c, t.tools), 1) for c in step)
        score_episodes([e := replay(t, t.demonstration)], RulesJudge(), RewardConfig(no_call_reply="judge"))
        assert e.rewards.summary == 1.0


def test_refuses_unknown_split():
    with pytest.raises(ValueError, match="test"):
        World("test")


# ---- gold

@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_gold_is_right(split, kind):
    """300 tasks of each kind: gold passes the simulator's check, facts are the simulator's answers, and the clean
    demonstration, replayed as an episode, is a perfect one: process 1 (.9 without calls), rating excellent."""
    world, simulator, judge = World(split, 2), Simulator(), RulesJudge()
    for i in range(300):
        task = world.task(i, kind)
        assert task.subset == kind and task.messages[-1]["role"] == "user" and len(task.tools) == world.tools_per_task
        values = []
        for step in task.gold_calls:
            for c in step:
                assert check_call(c, task.tools) == (c, "")
                seen = simulator.respond(c, task.tools)
                assert not is_error(seen) and phi_check(c, task.tools, seen)
                values.append(facts_of(seen, BY_NAME[c["name"]]))
        answered = len(task.gold_calls[-1]) if task.gold_calls else 0
        assert made(task) == task.gold_calls and task.demonstration[-1]["content"] == task.answer
        told = [m["content"] for m in task.demonstration if m["role"] == "tool"]
        assert told == [simulator.respond(c, task.tools) for step in task.gold_calls for c in step]
        if kind == "no_call":
            assert not task.gold_calls and names(task.question, task.facts[0])
        else:
            assert task.facts == [v for facts in values[-answered:] for v in facts]
            assert all(names(text, v) for text, facts in zip(told, values, strict=True) for v in facts)
        score_episodes([e := replay(task, task.demonstration)], judge, RewardConfig(no_call_reply="judge"))
        want = 1.0 if task.gold_calls else .9
        assert (e.rewards.process, e.rewards.summary) == pytest.approx((want, 1.0), abs=1e-9)
        assert e.rewards.total == pytest.approx(want + 1)


def test_no_call_needs_no_tool():
    for task in World("train", 2).tasks(400):
        if task.subset == "no_call":
            assert any(task.question == ask.format(*task.facts) for ask, _ in CHAT)


def test_arguments_can_be_read_off():
    """Every argument of the first step stands in the question; later ones in the question or an earlier result."""
    for task in World("train", 2).tasks(800):
        text = task.question
        for step in task.gold_calls:
            assert all(names(text, str(v)) for c in step for v in c["arguments"].values()), (task.id, text)
            text += "\n" + "\n".join(Simulator().respond(c, task.tools) for c in step)


def test_dependent_second_argument_comes_from_the_first_result():
    copied = 0
    for i in range(300):
        task = World("train", 4).task(i, "dependent")
        (first,), (second,) = task.gold_calls
        found = list(json.loads(Simulator().respond(first, task.tools)).values())
        values = list(second["arguments"].values())
        assert found == values[:1] and first["name"] != second["name"]
        copied += not names(task.question, str(found[0]))
    assert copied > 290  # it cannot be had without the first call (but for a chance number)


def test_parallel():
    sizes, same, repeated = Counter(), 0, 0
    for i in range(400):
        (step,) = World("train", 4).task(i, "parallel").gold_calls
        sizes[len(step)] += 1
        same += len({c["name"] for c in step}) == 1
        repeated += len({json.dumps(c) for c in step}) < len(step)
    assert set(sizes) == {2, 3} and 1.2 < sizes[2] / sizes[3] < 3.4  # two are twice as frequent
    assert .4 < same / 400 < .62 and repeated < 8


def test_history_holds_a_complete_earlier_turn():
    other = 0
    for i in range(300):
        task = World("train", 4).task(i, "history")
        user, called, result, reply, asked = task.messages
        assert [m["role"] for m in task.messages] == ["user", "assistant", "tool", "assistant", "user"]
        (earlier,), ((gold,),) = called["tool_calls"], task.gold_calls
        assert check_call(earlier, task.tools) == (earlier, "") and earlier["name"] == gold["name"]
        assert result["content"] == Simulator().respond(earlier, task.tools)
        facts = facts_of(result["content"], BY_NAME[earlier["name"]])
        assert all(names(reply["content"], f) and names(result["content"], f) for f in facts)
        assert all(names(user["content"], str(v)) for v in earlier["arguments"].values())
        assert all(names(asked["content"], str(v)) for v in gold["arguments"].values())
        other += earlier != gold
    assert other > 290


@pytest.mark.parametrize("count", [1, 2, 3, 5, len(FAMILIES)])
def test_tools_offered(count):
    """As many as asked for, the needed ones always among them, each family once, the needed ones at any place."""
    world, places = World("heldout", 1, tools_per_task=count), Counter()
    for task in world.tasks(300):
        needed = {c["name"] for step in task.gold_calls for c in step}
        assert needed <= set(task.allowed_tools) and len(task.tools) == max(count, len(needed))
        assert len({BY_NAME[n].key for n in task.allowed_tools}) == len(task.tools)
        if len(needed) == 1:
            places[task.allowed_tools.index(*needed)] += 1
    if count <= 5:
        assert len(places) == count and min(places.values()) > sum(places.values()) / count / 4
    assert len(world.task(0, "single", 4).tools) == 4


# ---- splits

def combination(schema: dict) -> tuple:
    return schema["function"]["name"], tuple(schema["function"]["parameters"]["properties"])


def asked_values(task) -> set[str]:
    """Open values that the user states: arguments of first steps (history too) that belong to no closed set."""
    first = (task.gold_calls or [[]])[0] + [c for m in task.messages for c in m.get("tool_calls", [])]
    values = {str(v) for c in first for v, (_, kind) in zip(c["arguments"].values(), BY_NAME[c["name"]].args,
                                                          strict=True) if not isinstance(kind, tuple)}
    return values | set(task.facts if task.subset == "no_call" else ())


def test_splits_share_no_value_and_no_names(splits):
    values = {s: set().union(*map(asked_values, tasks)) for s, tasks in splits.items()}
    combinations = {s: {combination(tool) for t in tasks for tool in t.tools} for s, tasks in splits.items()}
    assert all(len(v) > 100 for v in values.values())
    assert not values["train"] & (values["validation"] | values["heldout"]) and not values["validation"] & values[
        "heldout"]
    for split in ("validation", "heldout"):
        assert not combinations["train"] & combinations[split]
        stated = {w for t in splits[split] for w in re.findall(r"[A-Z][a-z]+|\d+", t.question)}
        assert not stated & values["train"]  # nor anywhere else in what the user says
    for split, seen in combinations.items():  # each split has every family, train several names of each
        families = Counter(BY_NAME[name].key for name, _ in seen)
        assert families.keys() == FAMILIES.keys() and min(families.values()) >= (4 if split == "train" else 2)
        assert all(len(set(arguments)) == len(arguments) for _, arguments in seen)
    for part in ("name", "argument"):  # the single names are all shown in training, the combinations are new
        train, heldout = ({n for tool, arguments in combinations[s] for n in ([tool] if part == "name" else arguments)}
                          for s in ("train", "heldout"))
        assert heldout <= train and len(heldout) > .8 * len(train)


def test_every_part_of_a_value_is_seen_in_training(splits):
    """Held-out names are new combinations of syllables that training shows: copying them can be learnt."""
    words = {s: {v for t in tasks for v in asked_values(t) if not v.isdigit()} for s, tasks in splits.items()}
    seen = {part for v in words["train"] for part in re.findall(r"[^aeiou]+[aeiou]", v.lower())}
    assert all(part in seen for v in words["heldout"] for part in re.findall(r"[^aeiou]+[aeiou]", v.lower()))


# ---- rates

def within(hits: int, n: int, low: float, high: float | None = None, sigmas: float = 4.0) -> bool:
    """Is a count a plausible draw from binomial(n, p) with p in [low, high]?"""
    high = low if high is None else high
    return (hits >= n * low - sigmas * (n * low * (1 - low)) ** .5
            and hits <= n * high + sigmas * (n * high * (1 - high)) ** .5)


@pytest.mark.parametrize("mix", [None, {"single": .5, "parallel": .2, "dependent": .1, "history": .15, "no_call": .05},
                                 {"parallel": 1.0}])
def test_kinds_come_at_the_rates_of_the_mix(mix):
    kinds = Counter(t.subset for t in World("train", 8, mix=mix).tasks(2500))
    want = mix or dataclasses.asdict(Config().data.mix)
    assert all(within(kinds[k], 2500, p) for k, p in want.items()) and set(kinds) <= set(want)


def rate(flag_by_task: dict, low: float, high: float | None = None) -> None:
    hits, n = sum(flag_by_task.values()), len(flag_by_task)
    assert n >= 90, "too few tasks to tell"
    assert within(hits, n, low, high), f"{hits} of {n}, expected {low} to {high}"


def omitted(task) -> bool:
    return bool(task.gold_calls) and not made(task)


def first_family(task) -> str:
    return BY_NAME[task.gold_calls[-1][0]["name"]].key


def test_omission_rates(flawed):
    f = Flaws()
    for kind in ("parallel", "dependent"):
        rate({t.id: omitted(t) for t in flawed if t.subset == kind}, f.omit)
    alone = [t for t in flawed if t.subset in SINGLE]
    for habit, p in ((True, f.omit_family), (False, f.omit)):
        rate({t.id: omitted(t) for t in alone if (first_family(t) in OMIT_FAMILIES) == habit}, p)
    assert not any(omitted(t) for t in flawed if t.subset == "no_call")
    for t in flawed:  # one reply without any result
        if omitted(t):
            (reply,) = t.demonstration
            assert reply["content"] and not any(names(reply["content"], f) for f in t.facts)


def test_repeat_rates(flawed):
    f = Flaws()
    alone = [t for t in flawed if t.subset in SINGLE and not omitted(t)]
    for t in alone:
        assert made(t) in (t.gold_calls, [t.gold_calls[0] * 2])
    for habit, p in ((True, f.repeat_family), (False, f.repeat)):
        rate({t.id: made(t) != t.gold_calls for t in alone if (first_family(t) in REPEAT_FAMILIES) == habit}, p)


def test_parallel_flaws(flawed):
    f = Flaws()
    tasks = [t for t in flawed if t.subset == "parallel" and not omitted(t)]
    serial = {t.id: made(t) != t.gold_calls for t in tasks}
    assert all(made(t) == [[c] for c in t.gold_calls[0]] for t in tasks if serial[t.id])
    dropped = {t.id: t.demonstration[-1]["content"] != t.answer for t in tasks}
    assert all(t.answer.startswith(t.demonstration[-1]["content"]) for t in tasks)  # never misquoted, only cut short
    rate(serial, f.serial)
    rate(dropped, f.drop_result)
    both = {t.id: serial[t.id] and dropped[t.id] for t in tasks}  # the two are independent
    rate(both, f.serial * f.drop_result)


def test_dependent_flaws(flawed):
    f = Flaws()
    tasks = [t for t in flawed if t.subset == "dependent" and not omitted(t)]
    stopped = {t.id: made(t) == t.gold_calls[:1] for t in tasks}
    assert all(made(t) == t.gold_calls for t in tasks if not stopped[t.id])
    rate(stopped, f.stop_after_first)
    for t in tasks:
        if stopped[t.id]:
            assert names(t.demonstration[-1]["content"], str(next(iter(t.gold_calls[1][0]["arguments"].values()))))


def test_misquote_rate(flawed):
    """A misquoted value is drawn from its kind and may hit the true one by chance, most often in small closed sets."""
    p, told = Flaws().misquote, {}
    sizes = defaultdict(list)
    for f in FAMILIES.values():
        sizes[f.key] = [1 / len(kind) if isinstance(kind, tuple) else .02 for _, kind in f.results]
    for t in flawed:
        if t.subset in (*SINGLE, "dependent") and made(t) and len(made(t)) == len(t.gold_calls):
            told[t.id] = t.demonstration[-1]["content"] != t.answer
    by_chance = max(sum(s) / len(s) for s in sizes.values())
    rate(told, p * (1 - by_chance), p)


def test_needless_rate():
    tasks = [World("train", 3, flaws=Flaws(needless=.25)).task(i, "no_call") for i in range(600)]
    rate({t.id: bool(made(t)) for t in tasks}, .25)
    assert all(check_call(c, t.tools) == (c, "") for t in tasks for step in made(t) for c in step)
    assert all(t.demonstration[-1]["content"] == t.answer for t in tasks)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Flaws)])
def test_each_flaw_alone(name):
    """A single flaw at rate 1 spoils exactly the kinds it is about; all rates 0 are the clean demonstrations."""
    none = Flaws(**{f.name: 0.0 for f in dataclasses.fields(Flaws)})
    spoilt = {"serial": {"parallel"}, "drop_result": {"parallel"}, "stop_after_first": {"dependent"},
              "misquote": {"single", "history", "dependent"}, "omit": {"single", "history", "parallel", "dependent"},
              "omit_family": {*SINGLE}, "repeat": {*SINGLE}, "repeat_family": {*SINGLE}, "needless": {"no_call"}}[name]
    clean, seen = World("train", 6).tasks(250), set()
    assert as_json(World("train", 6, flaws=none).tasks(250)) == as_json(clean)
    for a, b in zip(clean, World("train", 6, flaws=dataclasses.replace(none, **{name: 1.0})).tasks(250), strict=True):
        if a.demonstration != b.demonstration:
            seen.add(a.subset)
            if name.endswith("_family"):
                assert first_family(a) in (OMIT_FAMILIES if name.startswith("omit") else REPEAT_FAMILIES)
    assert seen == spoilt


def test_demonstration_results_are_the_simulators(flawed):
    """Flawed or not, what a demonstration shows as a result is what the simulator answers to its call."""
    for t in flawed[:600]:
        calls = [c for step in made(t) for c in step]
        results = [m["content"] for m in t.demonstration if m["role"] == "tool"]
        assert results == [Simulator().respond(c, t.tools) for c in calls]
        assert t.demonstration[-1]["role"] == "assistant" and not t.demonstration[-1].get("tool_calls")


# ---- curriculum

def test_curriculum():
    world = World("train", 4, tools_per_task=5)
    assert as_json(curriculum_task(world, i, 1.0) for i in range(40)) == as_json(world.tasks(40))
    for progress, tools in ((0.0, 1), (.3, 2), (.5, 3), (.99, 5)):
        tasks = [curriculum_task(world, i, progress) for i in range(400)]
        assert as_json(tasks[:5]) == as_json(curriculum_task(world, i, progress) for i in range(5))
        assert Counter(len(t.tools) for t in tasks if t.subset == "single").keys() == {tools}
        hard = 1 - Config().data.mix.single
        assert within(sum(t.subset != "single" for t in tasks), 400, .15 * hard)
        assert all(set(c["name"] for s in t.gold_calls for c in s) <= set(t.allowed_tools) for t in tasks)


# ---- tokenizer

@pytest.fixture(scope="module")
def tokenizer():
    return world_tokenizer()


def test_tokenizer_is_deterministic(tokenizer):
    text = chat.render_text(World("heldout", 1).task(0).messages, World("heldout", 1).task(0).tools)
    again = world_tokenizer()
    assert again.encode(text) == tokenizer.encode(text)
    assert again._backend.to_str() == tokenizer._backend.to_str()


def test_tokenizer_size(tokenizer):
    assert 256 < tokenizer.size <= Config().model.vocab_size
    with pytest.raises(ValueError):
        world_tokenizer(260, examples=10)


def inside(ids: list[int], part: list[int]) -> int:
    return sum(ids[i:i + len(part)] == part for i in range(len(ids) - len(part) + 1))


def is_open(value: str) -> bool:
    return value.isdigit() or value not in {m for f in FAMILIES.values() for _, kind in (*f.args, *f.results)
                                            if isinstance(kind, tuple) for m in kind}


@pytest.mark.parametrize("parallel", ["list", "blocks"])
def test_a_value_has_the_same_tokens_everywhere(tokenizer, parallel):
    """Of a name or number: its own ids, alone, are a piece of the ids of the question, of the call, of the result and
    of the reply. (A word of a closed set stands in the enum, and may have the space before it in a text.)"""
    checked = 0
    for task in World("heldout", 1).tasks(150):
        ids = chat.render(task.messages, task.tools, tokenizer, parallel=parallel)
        for step, call_message in zip(task.gold_calls, (m for m in task.demonstration if m.get("tool_calls")),
                                      strict=True):
            target = chat.assistant_target(call_message, tokenizer, parallel)
            for c in step:
                for v in c["arguments"].values():
                    own = tokenizer.encode(str(v))
                    if not is_open(str(v)):
                        continue
                    assert len(own) <= 3 and inside(target, own), (v, tokenizer.decode(target))
                    assert inside(ids, own) or len(task.gold_calls) > 1 and step is task.gold_calls[1]
        glue = chat.tool_turn([m["content"] for m in task.demonstration if m["role"] == "tool"] or ["none"], tokenizer,
                              closed=False)
        reply = chat.assistant_target(task.demonstration[-1], tokenizer, parallel)
        for fact in task.facts:
            own = tokenizer.encode(fact)
            if is_open(fact):
                checked += 1
                assert inside(reply, own) and (not task.gold_calls or inside(glue, own)), fact
    assert checked > 100


@pytest.mark.parametrize("parallel", ["list", "blocks"])
def test_both_forms_render(tokenizer, parallel):
    """Every kind of dialogue goes through text and ids alike, and its ids read back as that text."""
    for kind in KINDS:
        for i in range(20):
            task = World("heldout", 1, flaws=Flaws()).task(i, kind)
            dialogue = task.messages + task.demonstration
            ids = chat.render(dialogue, task.tools, tokenizer, False, parallel)
            text = chat.render_text(dialogue, task.tools, None, False, parallel)
            assert tokenizer.decode(ids) == text and max(ids) < tokenizer.size
            blocks = [m["tool_calls"] for m in dialogue if m.get("tool_calls")]
            wanted = sum(map(len, blocks)) if parallel == "blocks" else len(blocks)
            body = text[text.index("<|im_end|>"):]  # behind the system turn, which shows a block as an example
            assert body.count("<tool_call>") == body.count("</tool_call>") == wanted
            assert len(ids) < len(text) / 2.5  # phrases of the template are single entries
