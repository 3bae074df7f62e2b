"""Where a run's tasks come from: the embedded world by number, or files. Everything is fixed by seed and step.

Step `s` asks for its demonstrations or prompts and gets the same ones in every run; what is kept between calls only
saves time.
"""
from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import lru_cache

from slca import chat, ranks
from slca.data.task import Task
from slca.data.toucan import DataError, load_tasks
from slca.data.world import World
from slca.responders import python_tools
from slca.settings import Config
from slca.sft import Row, curriculum_task, demonstration_row, planner_task

POOL_STEPS = 8  # SFT steps of the world whose rows are drawn together and sorted by length
RL_TASKS = 10_000_000  # the world's RL prompts are numbered from here, apart from every demonstration


def world_split(cfg: Config, split: str) -> World:
    """The embedded world's split under a run's configuration; only training shows flawed demonstrations."""
    mix = {f.name: getattr(cfg.data.mix, f.name) for f in fields(cfg.data.mix)}
    return World(split, cfg.seed, mix, cfg.data.flaws if split == "train" else None, cfg.data.tools_per_task,
                 cfg.simulator.seed)


def file_tasks(cfg: Config, path: str) -> list[Task]:
    """The tasks of a file or folder. With responder python, tasks that bring no tools are offered its functions."""
    tasks = load_tasks(path, bad_rows=cfg.data.bad_rows)
    offered = python_tools(cfg.simulator.python).schemas if cfg.simulator.responder == "python" else []
    return [task if task.tools else replace(task, tools=offered) for task in tasks]


def spread(tasks: list[Task], n: int) -> list[Task]:
    """n of the tasks, evenly from first to last (files are often sorted by kind); all where there are no more."""
    n = min(n, len(tasks))
    return [tasks[i * len(tasks) // n] for i in range(n)]


@lru_cache(maxsize=4)
def shuffled(seed: int, epoch: int, count: int) -> list[int]:
    """The order of an epoch over count things."""
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def say(text: str) -> None:
    if ranks.rank() == 0:
        print(text)


class TaskSource:
    """Demonstrations and prompts by step; `validation` and `heldout` are lists. Raises DataError for unusable files."""

    def __init__(self, cfg: Config, tokenizer):
        self.cfg, self.tokenizer, d = cfg, tokenizer, cfg.data
        self.train = self.sft = self.world = self.pool = None
        if d.kind == "world":
            self.world, validation, heldout = (world_split(cfg, s) for s in ("train", "validation", "heldout"))
            self.validation, self.heldout = validation.tasks(d.validation_tasks), heldout.tasks(d.eval_tasks)
            longest = max(map(self._prompt_length, self.world.tasks(200)))
            if longest > cfg.rollout.max_prompt_tokens:
                raise DataError("embedded world", None, "rollout.max_prompt_tokens", f"{longest} or more",
                                cfg.rollout.max_prompt_tokens)
            return
        if cfg.rl.enabled:
            self.train = self._short_enough(file_tasks(cfg, d.train), d.train)
        if cfg.sft.enabled:
            self.sft = self._learnable(file_tasks(cfg, d.sft), d.sft)
        pool = file_tasks(cfg, d.heldout) if d.heldout else self.train or self.sft
        if not d.heldout:
            say("data.heldout is not given: the tables are over training tasks")
        self.heldout = spread(pool, d.eval_tasks)
        self.validation = spread(self.heldout, d.validation_tasks)

    def _short_enough(self, tasks: list[Task], path: str) -> list[Task]:
        """Tasks whose prompt is within the limit; says how many are not."""
        limit, wanted = self.cfg.rollout.max_prompt_tokens, self.cfg.rl.prompts_per_step
        kept = [t for t in tasks if self._prompt_length(t) <= limit]
        if len(kept) < wanted:
            raise DataError(path, None, "rl.prompts_per_step", f"at most {len(kept)}, as so many of {len(tasks)} "
                            f"prompts are within rollout.max_prompt_tokens = {limit}", wanted)
        if len(kept) < len(tasks):
            say(f"{path}: {len(tasks) - len(kept)} of {len(tasks)} prompts are over {limit} tokens, left out")
        return kept

    def _learnable(self, tasks: list[Task], path: str) -> list[Task]:
        """Tasks whose demonstration is not cut off before the assistant writes; says how many are left out."""
        limit, kept, cut = self.cfg.sft.max_tokens, [], 0
        for task in tasks:  # a row at a time: all of a large file would not fit
            row = self._row(task, limit + 1) if task.demonstration else None
            if row and 1.0 in row.weights[:limit]:
                kept.append(task)
                cut += len(row.ids) > limit
        if not kept:
            raise DataError(path, None, "sft.max_tokens",
                            f"a row with a demonstration within {limit} tokens (of {len(tasks)} rows none has one)")
        if len(kept) < len(tasks):
            say(f"{path}: {len(tasks) - len(kept)} of {len(tasks)} rows have no demonstration within {limit} tokens, "
                "left out")
        if cut:
            say(f"{path}: {cut} of {len(kept)} rows are over sft.max_tokens = {limit}: their ends are not learned")
        return kept

    def _row(self, task: Task, limit: int | None = None) -> Row:
        sft = self.cfg.sft
        task = planner_task(task) if sft.target == "planner" else task
        return demonstration_row(task, self.tokenizer, self.cfg.chat.parallel, sft.prompt_loss_weight,
                                 limit or sft.max_tokens)

    def _prompt_length(self, task: Task) -> int:
        return len(chat.render(task.messages, task.shown_tools, self.tokenizer, parallel=self.cfg.chat.parallel))

    def sft_steps(self) -> int:
        """The most steps SFT may take."""
        sft = self.cfg.sft
        by_epochs = sft.epochs * len(self.sft) // sft.rows_per_step if sft.epochs and self.sft else None
        return max(1, min(n for n in (sft.max_steps, by_epochs) if n is not None))

    def curriculum_steps(self) -> int:
        return int(self.cfg.sft.curriculum_fraction * self.sft_steps()) if self.world else 0

    def rl_steps(self) -> int:
        return self.cfg.rl.planned_steps(len(self.train or []))

    def demonstrations(self, step: int) -> list[Row]:
        """Rows of an SFT step. In the world eight steps share a pool sorted by length, so that batches are even. Files
        hold sets of unlike lengths: there each step is a mixture of its own."""
        n = self.cfg.sft.rows_per_step
        if not self.world:
            return [self._row(task) for task in self._slice(self.sft, step * n, n)]
        pool, at = divmod(step, POOL_STEPS)
        if self.pool != pool:
            first, size = pool * POOL_STEPS * n, POOL_STEPS * n
            easy = self.curriculum_steps()
            progress = pool * POOL_STEPS / easy if easy else 1.0
            tasks = [curriculum_task(self.world, i, progress) for i in range(first, first + size)]
            rows = sorted(map(self._row, tasks), key=lambda row: len(row.ids))
            steps = [rows[i:i + n] for i in range(0, size, n)]
            random.Random(f"{self.cfg.seed}/{pool}").shuffle(steps)
            self.pool, self.rows = pool, steps
        return self.rows[at]

    def prompts(self, step: int) -> list[Task]:
        """Tasks of an RL step."""
        n = self.cfg.rl.prompts_per_step
        return self.world.tasks(n, RL_TASKS + step * n) if self.world else self._slice(self.train, step * n, n)

    def spare(self, step: int) -> list[Task]:
        """As many further tasks for an RL step, to take the place of those without any signal (rl.dynamic_sampling)."""
        n = self.cfg.rl.prompts_per_step
        if self.world:
            return self.world.tasks(n, 2 * RL_TASKS + step * n)
        return self._slice(self.train, (step + 1) * n + len(self.train) // 2, n)  # half a pass ahead

    def _slice(self, tasks: list[Task], first: int, n: int) -> list[Task]:
        """n tasks from number `first` on of an endless stream: the list shuffled anew each epoch."""
        places = (divmod(i, len(tasks)) for i in range(first, first + n))
        return [tasks[shuffled(self.cfg.seed, epoch, len(tasks))[at]] for epoch, at in places]
