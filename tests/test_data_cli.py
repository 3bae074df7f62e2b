"""`python -m slca.data`: what inspect prints, what convert and split write, and that rows are streamed.

The split is checked by hand on a few dialogues and against the paper's counts."""
from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from test_data import PLAIN, RL, SFT
from test_data_sets import DATA, REPLY, TOOL, USER, called, raw, result, write

from slca.data import DataError, iter_tasks, load_tasks
from slca.data.__main__ import main
from slca.data.split import assign, overall_score, refused
from slca.data.toucan import read_tasks

ONE = [USER, called("{}"), result("3"), REPLY]


def turns(n):
    return ONE * n


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(capsys, *args):
    code = main([str(a) for a in args])
    return code, *capsys.readouterr()


# --- convert and inspect ---------------------------------------------------------------------------------------------

def test_convert_writes_tasks_that_come_back_equal(tmp_path, capsys):
    out = tmp_path / "new" / "tasks.jsonl"
    files = [DATA / "seal_tools/rows.jsonl", DATA / "api_bank/dialogues.jsonl", DATA / "glaive/rows.json"]
    code, said, _ = run(capsys, "convert", *files, out, "--decompose")
    expected = [t for f in files for _, t in iter_tasks(f, decompose=True) if not isinstance(t, DataError)]
    assert code == 0 and load_tasks(out) == expected
    assert [row["id"] for row in lines(out)] == [t.id for t in expected] and "facts" in lines(out)[0]
    dropped = lines(out.with_name("tasks.dropped.jsonl"))
    assert [(Path(d["file"]).name, d["row"]) for d in dropped] == [("dialogues.jsonl", 10)]
    assert dropped[0]["field"] == "turns" and dropped[0]["expected"] == "a user turn"
    assert f"{len(expected)} tasks of 38 rows" in said and "dropped rows: 1" in said
    assert "      1  expected turns: a user turn - first: " in said
    assert sorted(p.name for p in out.parent.iterdir()) == ["tasks.dropped.jsonl", "tasks.jsonl"]
    assert load_tasks(out.parent) == expected  # a folder: dropped rows are no tasks


def test_convert_keeps_ids_apart_over_files_and_no_empty_list_of_drops(tmp_path, capsys):
    (tmp_path / "out.dropped.jsonl").write_text("of an earlier run")
    row = {"id": "x", **PLAIN}
    a, b = write(tmp_path, row, {**row, "id": "x#2"}, name="a.jsonl"), write(tmp_path, row, name="b.jsonl")
    assert run(capsys, "convert", a, b, tmp_path / "out.jsonl")[0] == 0
    assert [r["id"] for r in lines(tmp_path / "out.jsonl")] == ["x", "x#2", "x#3"]
    assert not (tmp_path / "out.dropped.jsonl").exists()


def test_any_text_survives_convert(tmp_path, capsys):
    hostile = PLAIN | {"id": "\ud800\u2028", "messages": [{"role": "user", "content": "\ud800 \u2028 \r ü <|im_end|>"},
                                                          {"role": "assistant", "content": "ok"}]}
    path = write(tmp_path, hostile)
    assert run(capsys, "convert", path, tmp_path / "out.jsonl")[0] == 0
    assert load_tasks(tmp_path / "out.jsonl") == load_tasks(path)


def test_nothing_half_written(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    path = write(tmp_path, PLAIN, PLAIN)
    calls = iter([None])

    def stop(file, task):
        file.write("half")
        next(calls)  # the second task raises StopIteration

    monkeypatch.setattr("slca.data.__main__.write_task", stop)
    with pytest.raises((StopIteration, RuntimeError)):
        main(["convert", str(path), str(out)])
    assert out.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_errors_of_the_commands(tmp_path, capsys):
    good, bad = write(tmp_path, PLAIN), write(tmp_path, {"a": 1}, name="bad.jsonl")
    for args, part in ((("inspect", tmp_path / "no.jsonl"), "exists"), (("inspect", bad), "usable row; the first: "),
                       (("convert", good), "OUT.jsonl"), (("convert", good, tmp_path / "o.json"), "ends in .jsonl"),
                       (("convert", good, good), "none of the inputs"), (("convert", bad, tmp_path / "o.jsonl"),
                                                                         "row 1"),
                       (("split", bad, "--out", tmp_path), "usable row"),
                       (("split", good, "--out", tmp_path), "3000 samples of single-turn dialogues"),
                       (("inspect", good, "--kind", "toucan_rl"), "reward_model")):
        code, _, error = run(capsys, *args)
        assert code == 1 and error.startswith("error: ") and part in error, args
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "rows.jsonl"]
    for args in (["split", str(good), "--sft-share", "2"], ["split", str(good), "--heldout", "-1", "2"], ["look"]):
        with pytest.raises(SystemExit):
            main(args)


def test_inspect_counts(tmp_path, capsys):
    path = write(tmp_path, PLAIN, RL, SFT, raw(turns(2)), raw("{"), raw("[1"), {"a": 1})
    code, said, _ = run(capsys, "inspect", path)
    assert code == 0
    for line in ("rows: 7", "tasks: 4, 3 with a demonstration, 0 with facts, 0 without gold calls",
                 "kinds: toucan_raw 3, openai 1, toucan_rl 1, toucan_sft 1, unknown 1",
                 "gold form: names 1", "gold calls a task: 11 in all, mean 2.75, 1 to 5 (1 in 2, 4 in 1, 5 in 1)",
                 "steps a task: 6 in all, mean 1.50, 1 to 3 (1 in 3, 3 in 1)",
                 "user turns a prompt: 5 in all, mean 1.25, 1 to 2 (1 in 3, 2 in 1)", "dropped rows: 3",
                 f"        2  expected messages: JSON - first: {path}, row 5"):
        assert line in said.splitlines(), line


# --- streaming -------------------------------------------------------------------------------------------------------

def many(tmp_path, n):
    """n short dialogues in rows of about 1.6 KB."""
    path, row = tmp_path / f"many{n}.jsonl", {"messages": [USER, REPLY], "note": "x" * 1500}
    path.write_text((json.dumps(row) + "\n") * n)
    return path


def test_memory_does_not_grow_with_the_file(tmp_path, capsys):
    peaks = {}
    for n in (200, 1000, 8000):
        path = many(tmp_path, n)
        tracemalloc.start()
        run(capsys, "convert", path, tmp_path / "out.jsonl")
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # the first run warms up; of 7,000 more rows (11 MB) only the ids stay
    assert peaks[8000] - peaks[1000] < 7000 * 250, peaks


def test_a_row_is_given_before_the_file_is_read_to_its_end(tmp_path):
    path = many(tmp_path, 3)
    found = iter_tasks(path)
    assert next(found)[0] == 1
    with path.open("a") as file:
        file.write("{\n" + json.dumps(PLAIN))
    rest = list(found)
    assert [n for n, _ in rest] == [2, 3, 4, 5] and isinstance(rest[2][1], DataError)


def test_parquet_is_converted_too(tmp_path, capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [raw(turns(2), uuid=f"u{i}") for i in range(3)] + [raw("[", uuid="bad")]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert run(capsys, "convert", tmp_path / "rows.parquet", tmp_path / "out.jsonl", "--decompose")[0] == 0
    assert [t.id for t in load_tasks(tmp_path / "out.jsonl")] == ["u0-turn2", "u1-turn2", "u2-turn2"]
    dropped, = lines(tmp_path / "out.dropped.jsonl")
    assert (dropped["row"], dropped["field"]) == (4, "messages")


# --- the pipeline ----------------------------------------------------------------------------------------------------

def test_the_papers_counts():
    """119,279 rows -> 79,279 -> 78,241 samples -> 4,000 held out, 74,241 left = 42,423 SFT + 31,818 RL."""
    kept = 119_279 - 40_000 - 1_038  # what the two filters drop
    single, sizes = 60_000, {}
    for i in range(single):
        sizes[f"s{i}"] = (1, False)
    left = kept - single
    while left:
        sizes[f"m{left}"] = (samples := min(left, 1 + len(sizes) % 3), True)
        left -= samples
    where = assign(sizes)
    counts, by_turns = Counter(), Counter()
    for name, split in where.items():
        counts[split] += sizes[name][0]
        by_turns[split, sizes[name][1]] += sizes[name][0]
    assert kept == 78_241 and sum(counts.values()) == kept and len(where) == len(sizes)
    assert counts == {"heldout": 4000, "sft": 42_423, "rl": 31_818} and 42_423 + 31_818 == 74_241
    assert by_turns["heldout", False] == 3000 and by_turns["heldout", True] == 1000


def test_assign_by_hand():
    sizes = {"a": (1, False), "b": (1, False), "c": (2, True), "d": (3, True), "e": (1, False), "f": (2, True)}
    found = [assign(sizes, (1, 2), 0.5, seed) for seed in range(20)]
    for where in found:
        assert set(where) == set(sizes)
        held = [name for name in sizes if where[name] == "heldout"]
        assert sorted(sizes[n] for n in held) == [(1, False), (2, True)]  # d has three samples and never fits
        sft = sum(sizes[n][0] for n in sizes if where[n] == "sft")
        assert sft <= 4 and {"sft", "rl"} <= set(where.values())  # half of the seven samples that are left, rounded
    assert found[0] == assign(dict(reversed(sizes.items())), (1, 2), 0.5, 0)  # the order of the rows does not matter
    assert len({json.dumps(sorted(w.items())) for w in found}) > 5  # the seed does
    assert Counter(assign({"x": (2, True), "y": (2, True)}, (0, 3), 0.5).values()) == {"heldout": 1, "rl": 1}  # 2 of 3
    with pytest.raises(ValueError, match=r"4 samples of single-turn dialogues to hold out \(there are 3\)"):
        assign(sizes, (4, 2))


@pytest.mark.parametrize(("row", "stage", "part"), [
    (raw(ONE), "", ""), (raw([USER, REPLY]), "relevance", "a call of an offered tool"),
    (raw([USER, REPLY], subset_name="irrelevant"), "", ""),
    (raw(ONE, subset_name="irrelevant"), "relevance", "no call"),
    (raw(ONE, question_quality_assessment='{"overall_score": 2.5}'), "relevance", "a score of 3 or more"),
    (raw(ONE, question_quality_assessment='{"overall_score": 3}'), "", ""),
    (raw(ONE, response_quality_assessment='{"completeness": {"score": 2}, "conciseness": {"score": 3}}'), "relevance",
     "a score of 3"),
    (raw("[", response_quality_assessment='{"overall_score": 1}'), "relevance", "a score of 3"),  # relevance first
    (raw(ONE, question_quality_assessment="{"), "relevance", "JSON"), (raw("["), "format", "JSON"),
    (raw([USER, called("{x"), result("3"), REPLY]), "format", "JSON"),
    (raw([USER, called("{}", "other"), result("3"), REPLY]), "format", "offered tools only"),
    ({"messages": [USER, REPLY], "tools": [TOOL]}, "", "")])  # other kinds may hold turns without a call
def test_the_filter(tmp_path, row, stage, part):
    read, = read_tasks(write(tmp_path, row), decompose=True)
    found, why = refused(read, 3.0)
    assert found == stage and (not stage or part in getattr(why, "expected", why.args[1:2] and why.args[1]))


def test_scores():
    assert overall_score({"overall_score": 4, "a": {"score": 1}}) == 4
    assert overall_score({"a": {"score": 1}, "b": {"score": 4}, "order_correctness": True}) == 2.5
    assert all(overall_score(a) is None for a in (None, [], {}, {"overall_score": None}, {"a": {"score": True}}))


def test_split_by_hand(tmp_path, capsys):
    rows = ([raw(ONE, uuid=f"s{i}") for i in range(10)] + [raw(turns(3), uuid=f"m{i}", subset_name="multi-turn")
                                                           for i in range(8)]
            + [raw(turns(3), uuid="m0", subset_name="multi-turn"), raw([USER, REPLY], uuid="no"), raw("[", uuid="bad")])
    a, b = write(tmp_path, *rows[:15], name="a.jsonl"), write(tmp_path, *rows[15:], name="b.jsonl")
    out = tmp_path / "out"
    args = ("split", a, b, "--out", out, "--heldout", 3, 4, "--sft-share", 0.5)
    code, said, _ = run(capsys, *args)
    assert code == 0 and "rows 21 -> relevant 20 -> well formed 19, of 18 dialogues" in said
    # 10 single-turn samples, 9 rows of two samples each (from the second turn on)
    assert "samples 28 -> held out 7 (3 + 4) -> 21 = 10 SFT + 11 RL" in said
    tasks = {name: load_tasks(out / f"{name}.jsonl") for name in ("heldout", "sft", "rl")}
    assert {name: len(found) for name, found in tasks.items()} == {"heldout": 7, "sft": 10, "rl": 11}
    by_dialogue = {name: {t.id.split("-")[0].split("#")[0] for t in found} for name, found in tasks.items()}
    assert not by_dialogue["heldout"] & by_dialogue["sft"] and not by_dialogue["rl"] & by_dialogue["sft"]
    assert not by_dialogue["heldout"] & by_dialogue["rl"] and len(set.union(*by_dialogue.values())) == 18
    assert len({t.id for found in tasks.values() for t in found}) == 28
    assert sum(t.id.startswith("s") for t in tasks["heldout"]) == 3
    assert [(d["row"], d["field"]) for d in lines(out / "dropped.jsonl")] == [(5, "messages"), (6, "messages")]
    first = (out / "sft.jsonl").read_bytes()
    run(capsys, *args)
    assert (out / "sft.jsonl").read_bytes() == first
    run(capsys, *args, "--seed", 1)
    assert (out / "sft.jsonl").read_bytes() != first
    assert sorted(p.name for p in out.iterdir()) == ["dropped.jsonl", "heldout.jsonl", "rl.jsonl", "sft.jsonl"]
