"""The run's records: metrics lines are documented and finite, the console line keeps its columns, the page shows curves
and rollouts of the right colour, and nothing a model wrote can act in it or load anything."""
from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from slca.page import rollout_html, smooth, write_report
from slca.report import GLOSSARY, RunLog, console_line, final_table, read_metrics, undocumented

HOSTILE = '</span><script>alert("x")</script><img src=https://evil.example/a onerror=\'go()\'>&lt;"\u202e\x00\ud800\r'
METRICS = {"process": 0.8, "summary": 0.5, "success": 0.4, "name_f1": 1.0, "arg_match": 0.9, "parallel": 0.7,
           "no_call": 0.0, "redundant_calls": 0.25, "calls_per_task": 1.5, "gold_calls_per_task": 1.25, "tool_turns": 1,
           "n": 200}


def rollout(**changes):
    record = {"step": 3, "task_id": "t-1", "subset": "parallel", "rank": "best", "status": "answered",
              "tokens": ["ask", "call", "result", "reply", "quiet"], "ids": [5, 6, 7, 8, 9],
              "labels": [0, 1, 0, 2, 2], "policy_mask": [0, 1, 0, 1, 1], "logprobs": [0.0, -0.5, 0.0, -0.25, -0.1],
              "advantages": [0.0, 1.0, 0.0, -3.0, 0.0], "prompt_length": 1, "scores": {"process": 0.925},
              "gold_calls": [[{"name": "add", "arguments": {"a": 1}}]], "facts": ["3"]}
    return record | changes


class Page(HTMLParser):
    """Tags with attributes, and the text outside of <style>."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.inside = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data):
        if self.inside != "style":
            self.text.append(data)


def test_tokens_carry_segment_sign_size_and_numbers():
    spans = [attrs for tag, attrs in Page(rollout_html(rollout())).tags if tag == "span" and attrs["class"][:2] == "t "]
    assert [s["class"] for s in spans] == ["t ignore", "t tool up", "t ignore", "t summary down", "t summary"]
    assert [s.get("style") for s in spans] == [None, "--a:0.50", None, "--a:1.00", "--a:0.00"]  # |A| / 2, at most 1
    assert spans[1]["title"] == "token 6 | tool | logprob -0.500 (p 0.61) | advantage +1.000"
    assert spans[2]["title"] == "token 7 | ignore | not scored"
    with pytest.raises(ValueError, match=r"step_1.json: expected equal lengths.*'ids': 4"):
        rollout_html(rollout(ids=[1, 2, 3, 4]), "step_1.json")


def run(folder, text="call"):
    log = RunLog(folder)
    for step in range(1, 31):
        log.write("sft", step, {"sft_loss": 4 / step, "lr": 0.01})
    for step in range(1, 21):
        log.write("rl", step, {"process": step / 20, "summary": 0.5, "reward": 0.5 + step / 20, "no_call": 0.1,
                               "redundant_calls": 0.2, "grad_norm": 1.0, "logprob_gap": 1e-6})
    log.write("rl", 20, {"val_success": 0.5, "val_summary": 0.6, "val_process": 0.7})
    log.save_rollouts(20, [rollout(tokens=[text] * 5, task_id=text, status=text, subset=text, facts=[text],
                                   scores={text: text}, gold_calls=[[{"name": text}]])])
    (folder / "config.yaml").write_text("path: <script>&'\"</script>\n")
    (folder / "summary.json").write_text(json.dumps({"seed": 7, "wall_s": 90, "before": METRICS, "after_rl": METRICS}))
    return write_report(folder).read_text(encoding="utf-8")


def test_model_text_cannot_act_in_the_page_and_nothing_is_loaded(tmp_path):
    honest, hostile = Page(run(tmp_path / "a")), Page(run(tmp_path / "b", HOSTILE))
    assert [tag for tag, _ in honest.tags] == [tag for tag, _ in hostile.tags if tag != "u"]  # no tag from the text
    names = {tag for tag, _ in hostile.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    for tag, attrs in hostile.tags:
        assert not {"src", "href", "srcset", "action", "background"} & attrs.keys(), tag
        assert not any(name.startswith("on") for name in attrs), tag
    style = (tmp_path / "b" / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"} in [
        attrs for tag, attrs in hostile.tags if tag == "meta"]
    text = "".join(hostile.text)
    assert '</span><script>alert("x")</script>' in text  # shown as it was written ...
    assert "\\u202e\\u0000\\ud800\\u000d" in text  # ... with hidden characters spelled out
    assert not set("\u202e\x00\r") & set(text)
    plain = Page(run(tmp_path / "c")).tags
    assert "https://" not in str(plain) and "http://" not in (tmp_path / "c" / "report.html").read_text()


def test_the_page_holds_curves_table_and_config(tmp_path):
    page = run(tmp_path)
    card = page.split("<h3>Training reward by stream</h3>")[1].split("</figure>")[0]
    lines = re.findall(r"<g class=(\w+)>.*?<polyline class=raw points=\"(.*?)\" />", card)
    assert [name for name, _ in lines] == ["tool", "summ", "ink"]
    points = [tuple(map(float, point.split(","))) for point in lines[0][1].split()]
    assert len(points) == 20 and points[0][0] == 48 and points[-1][0] == 508  # from axis to axis
    assert all(a[1] > b[1] for a, b in zip(points, points[1:], strict=False))  # rising process goes up the page
    assert len({y for _, y in (p.split(",") for p in lines[1][1].split())}) == 1  # constant summary is level
    assert ">1e-6</text>" in page.split("<h3>Sampler and learner</h3>")[1].split("</figure>")[0]  # decades
    assert "polyline" in page.split("<h3>Supervised loss</h3>")[1].split("</figure>")[0]
    assert "This run wrote no such metric." in page.split("<h3>Advantage by segment</h3>")[1].split("</figure>")[0]
    text = "".join(Page(page).text)
    assert "20 RL steps / seed 7 / 1.5 minutes" in text and "path: <script>&'\"</script>" in text
    (tmp_path / "empty").mkdir()
    assert "No rollouts were saved" in write_report(tmp_path / "empty").read_text()


def test_metrics_are_documented_finite_and_flushed(tmp_path):
    log = RunLog(tmp_path)
    with pytest.warns(UserWarning, match="rl step 2: loss is nan, written as null"):
        log.write("rl", 2, {"loss": math.nan, "kl": torch.tensor(0.5), "tool_turns": 1})
    assert read_metrics(tmp_path) == [{"phase": "rl", "step": 2, "loss": None, "kl": 0.5, "tool_turns": 1}]
    with pytest.raises(ValueError, match="made_up"):
        log.write("rl", 3, {"made_up": 1.0})
    assert undocumented([{"loss": 1, "b": 2}, {"a": 3}]) == ["a", "b"]
    assert all(text.endswith(".") and len(text) > 15 for text in GLOSSARY.values())
    with log.path.open("a") as file:
        file.write('{"phase": "rl", "st')  # a crash in the middle of a line
    assert len(read_metrics(tmp_path)) == 1


def test_a_resumed_run_does_not_repeat_steps(tmp_path):
    log = RunLog(tmp_path)
    for phase, step in (("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3)):
        log.write(phase, step, {})
    log.rewind("rl", 2)
    assert [(r["phase"], r["step"]) for r in read_metrics(tmp_path)] == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)]
    log.rewind("sft", 1)
    assert [(r["phase"], r["step"]) for r in read_metrics(tmp_path)] == [("sft", 1)]


def test_console_lines_keep_their_columns():
    full = {"time_s": 12.34, "reward": -0.5, "process": 0.61, "summary": 0.2, "success": 0.355, "no_call": 0.02,
            "redundant_calls": 0.1, "advantage_abs": 0.7, "grad_norm": 0.31, "lr": 2e-4, "logprob_gap": 1.2e-6,
            "tok_s": 5230.4}
    lines = [console_line(1, full), console_line(1000, {}), console_line(20, full | {"reward": None})]
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1
    for part in ("12.3s", "reward -0.500", "proc 0.610", "succ  35.5%", "lr 2.0e-04", "gap 1.2e-06", "5230 tok/s"):
        assert part in lines[0]
    assert "loss  0.5000" in console_line(3, {"sft_loss": 0.5}, "sft")


def test_final_table():
    lines = final_table({"after_sft": METRICS, "after_rl": METRICS | {"success": 0.8125}}).splitlines()
    assert lines[0].split() == ["after", "SFT", "after", "RL"] and len({len(line) for line in lines}) == 1
    assert lines[2].split()[-2:] == ["0.400", "0.812"] and lines[-1].split() == ["Tasks", "200", "200"]
    assert "-" in final_table({"before": {}, "after_sft": {"process": 0.5}}).splitlines()[2]


def test_smoothing_is_unbiased_at_the_start():
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2, 2, 2])
    assert smooth([0.0, 1.0], 0.5) == pytest.approx([0, 2 / 3])  # (0.5 * 0 * 0.5 + 0.5 * 1) / 0.75


def test_the_readme_explains_every_metric():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    missing = [name for name, sentence in GLOSSARY.items() if f"| `{name}` | {sentence} |" not in readme]
    assert missing == []
