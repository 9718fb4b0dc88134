"""A fusion from end to end: a parent, what can be fused in it, what that costs, what training wins back, a checkpoint.

Each stage leaves its results in the work directory, whole or not at all, and reads those of the stages before from
there. So a stage runs alone, and a run that was killed goes on: finished stages are passed over, and analyses, tables
and training go on inside.

parent/          the parent's own training    analysis/, analysis.json   scores, dependencies, heat maps
plan.json        what is done                 fused/, fused.json         the child, in Hugging Face layout; its sizes
table.json       a row to every variant       time.json                  a decoding step before and after
distil/, distilled.json   training of the child; its row                 export/   checkpoints, read back
report.md, summary.json   all of it, for people and for programs
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from lsfuse import fusion, io
from lsfuse.fusion.describe import on_shapes, summarize
from lsfuse.fusion.distil import Model
from lsfuse.io.hf_config import why_not_family
from lsfuse.model import abstract_params, forward, logits
from lsfuse.train import fuse_analysis, fuse_time
from lsfuse.train import workdir as files
from lsfuse.train.distil import run_distillation, surgery
from lsfuse.train.fuse_report import write_fusion_report
from lsfuse.train.fuse_setup import RESULTS, FuseSetup, set_up_fusion, training
from lsfuse.train.fuse_table import DISTILLED, PARENT, continued, measure, variants
from lsfuse.train.metadata import write_run_files
from lsfuse.train.progress import Progress


def fuse(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | pathlib.Path,
    *,
    parent: Model | None = None,
    tokenizer: Any = None,
    resume: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Runs the stages that `config.stages` names, all by default, and leaves everything in `workdir` (see the module).

    Args:
        config: from `default_config(FUSE_SCHEMA)`, `load_config(file)`, or a plain nested dict of the fields that
            differ.
        workdir: a directory that is empty or not there; with `resume`, one that holds a run of the same config,
            whatever its `stages`.
        parent: (config, params), instead of the config's; tokenizer: likewise (anything with `encode` and
            `vocab_size`).

    Returns: what summary.json holds, if the report was among the stages; else {}.

    Raises:
        ValueError, FileExistsError, FileNotFoundError: anything wrong with what was given, before any work; results in
            `workdir` of another model; a rule that finds nothing to fuse.
        Otherwise as `distil`.
    """
    workdir = pathlib.Path(workdir).absolute()
    setup = set_up_fusion(config, workdir, parent=parent, tokenizer=tokenizer, resume=resume)
    with files.full_disk(workdir), files.locked(workdir):
        files.check_workdir(workdir, setup.saved, resume)
        write_run_files(workdir, setup.saved)
        run = _Run(setup, workdir, progress)
        for stage in setup.stages:
            run.stage(stage)
        return run.summary


class _Run:
    """One session of a run."""

    def __init__(self, setup: FuseSetup, workdir: pathlib.Path, progress: bool):
        self.setup, self.workdir, self.bars = setup, workdir, progress
        self.progress = Progress(progress)
        self.summary: dict[str, Any] = {}

    # --- files --------------------------------------------------------------------------------------------------------

    def stage(self, name: str) -> None:
        if name == "warm_start":  # before there is a model
            done = (self.workdir / RESULTS[name]).is_file()
        else:
            done = name != "report" and self.read(RESULTS[name], complete=True) is not None
        self.progress.line(f"{name}: {'finished before' if done else 'starts'}")
        if not done:
            getattr(self, name)()

    def read(self, name: str, complete: bool = False) -> dict[str, Any] | None:
        """A stage's results, None if there are none. complete: None, too, where rows of it are missing yet. Raises
        ValueError for those of another model."""
        path = self.workdir / name
        if not path.is_file():
            return None
        found = files.read_object(path, "delete it, and --resume makes it again")
        if (theirs := str(found.get("model"))) != self.model:
            raise ValueError(
                f"{path} is of another model: its SHA-256 is {theirs[:12]} there, {self.model[:12]} here. Delete it,"
                " and --resume makes it again, or take another work directory"
            )
        return None if complete and not found.get("complete", True) else found

    def needed(self, stage: str) -> dict[str, Any]:
        found = self.read(RESULTS[stage])
        assert found is not None  # by check_inputs, and the order of stages
        return found

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        files.write_atomic(self.workdir / name, json.dumps({"model": self.model, **value}, indent=2) + "\n")

    # --- models -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def parent(self) -> Model:
        return self.load_parent()

    def load_parent(self) -> Model:
        if "warm_start" not in self.setup.work:
            return self.setup.load()
        return io.load_hf(self.workdir / "parent" / "model", self.setup.config.dtype)

    @functools.cached_property
    def about(self) -> dict[str, str]:
        return fusion.fingerprint(*self.parent, self.setup.analysed)

    @property
    def model(self) -> str:
        return self.about["model"]

    @functools.cached_property
    def child(self) -> Model:
        return self.load_child()

    def load_child(self) -> Model:
        """What the stage "fuse" has left. Raises ValueError if it is not what the plan makes of the parent."""
        folder = self.workdir / "fused"
        found = io.load_hf(folder, self.setup.config.dtype)
        expected, _ = self.child_shapes
        if found[0] != expected:
            raise ValueError(f"{folder} is not what plan.json makes of the parent; delete it, and run the stage fuse")
        return found

    @functools.cached_property
    def child_shapes(self) -> Model:
        """Its config, and parameters without values."""
        return on_shapes(self.surgery, *self.parent)

    @property
    def surgery(self) -> fusion.Transform:
        return surgery(ConfigDict(self.needed("plan")))

    @property
    def saved_tokenizer(self) -> Any:
        return self.setup.tokenizer if hasattr(self.setup.tokenizer, "save") else None

    # --- stages -------------------------------------------------------------------------------------------------------

    def warm_start(self) -> None:
        def load() -> tuple[Model, Model]:
            parent = self.setup.load()
            return parent, parent

        shapes = self.setup.parent, abstract_params(self.setup.parent, jnp.dtype(self.setup.config.dtype))
        self._train("warm_start", "parent", load, parent=shapes)

    def analyse(self) -> None:
        fields = self.setup.config.plan
        folder = self.workdir / "analysis"
        found = fuse_analysis.analyse(folder, self.parent, self.setup.analysed, fields, self.about, self.bars)
        self.write(RESULTS["analyse"], found)

    def plan(self) -> None:
        folder, removed = self.workdir / "analysis", self.needed("analyse")["removed"]
        found = fuse_analysis.plan(folder, self.parent[0], removed, self.setup.config.plan, self.about)
        self.write(RESULTS["plan"], found)
        self.progress.line(f"attention of {removed} removed, FFNs {found['fuse_ffn']} fused")

    def fuse(self) -> None:
        child = self.surgery(*self.parent)
        io.save_hf(self.workdir / "fused", *child, self.saved_tokenizer)
        self.write(RESULTS["fuse"], summarize(child[0], self.setup.config.dtype))

    def evaluate(self) -> None:
        importance = functools.cache(lambda: fusion.ffn_importance(*self.parent, self.setup.analysed))
        todo = variants(self.parent[0], self.child[0], self.needed("plan"), importance)
        table = self.read(RESULTS["evaluate"]) or {"rows": {}}
        for name, transform in todo.items():
            if name not in table["rows"]:
                table["rows"][name] = self._row(name, transform(*self.parent))
                self.write(RESULTS["evaluate"], {**table, "complete": len(table["rows"]) == len(todo)})

    def _row(self, name: str, child: Model) -> dict[str, Any]:
        config = self.setup.config
        prompt, dtype = config.generate.prompt, config.dtype
        row = measure(child, self.parent, self.setup.held_out, self.greedy, prompt, dtype)
        self.progress.line(f"  {name}: perplexity {row['perplexity']:.3f}, KL {row['kl']:.4f}")
        return row

    def time(self) -> None:
        fields, removed = self.setup.config.time, self.needed("plan")["remove_attention"]
        sequential = fusion.remove_attention(removed)(*self.parent)
        models = {fuse_time.PARENT: self.parent, fuse_time.SEQUENTIAL: sequential, fuse_time.FUSED: self.child}
        found = fuse_time.decode_times(models, fields.batch, fields.context, fields.steps, fields.repeats)
        self.write(RESULTS["time"], found)
        self.progress.line(f"  {found['why']}")

    @functools.cached_property
    def greedy(self) -> np.ndarray:
        return continued(self.parent, self.setup.prompts, self.setup.config.generate.tokens)

    def distil(self) -> None:
        parent = self.parent[0], jax.eval_shape(lambda params: params, self.parent[1])
        child = self.child_shapes
        # The loop reads them itself and keeps once what teacher and student share; nobody else may hold them.
        for name in ("parent", "child"):
            self.__dict__.pop(name, None)

        def load() -> tuple[Model, Model]:
            return self.load_parent(), self.load_child()

        trained = self._train("distil", "distil", load, parent=parent, child=child)
        self.write(RESULTS["distil"], {"row": self._row(DISTILLED, trained)})

    def _train(
        self,
        phase: str,
        folder: str,
        load: Callable[[], tuple[Model, Model]],
        parent: Model,
        child: Model | None = None,
    ) -> Model:
        """parent, child: shapes; load: the two."""
        setup = dataclasses.replace(training(self.setup, phase, parent=parent, child=child), load=load)
        result = run_distillation(setup, self.workdir / folder, resume=True, progress=self.bars)
        return result.model, result.params

    def export(self) -> None:
        """Raises ValueError if what is read back is not, to the bit, what was written."""
        source = "distil/model" if "distil" in self.setup.work else "fused"
        config, params = io.load_hf(self.workdir / source, self.setup.config.dtype)
        tabled = dataclasses.replace(config, family="nemotron-nas")
        found: dict[str, Any] = {"source": source, "written": [], "left out": {}}
        for name, written in (("lsfuse", config), ("nemotron-nas", tabled)):
            if name == "nemotron-nas" and (reasons := why_not_family(tabled)):
                found["left out"][name] = reasons
                continue
            folder = self.workdir / "export" / name
            io.save_hf(folder, written, params, self.saved_tokenizer, overwrite=True)
            self._check_copy(folder, config, params)
            found["written"].append(name)
        self.write(RESULTS["export"], found)

    def _check_copy(self, folder: pathlib.Path, config: Any, params: Any) -> None:
        copy_config, copy = io.load_hf(folder)
        ids = jnp.asarray(self.setup.held_out.ids[:1])
        mine, theirs = (logits(p, c, forward(p, c, ids)) for c, p in ((config, params), (copy_config, copy)))
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool(jnp.array_equal(a, b)), params, copy)
        if not (all(jax.tree.leaves(same)) and np.array_equal(np.asarray(mine), np.asarray(theirs))):
            raise ValueError(f"{folder}: what is read back differs from what was written; is the disk damaged?")

    def report(self) -> None:
        table = self.needed("evaluate")
        assert PARENT in table["rows"]
        results = {name: self.read(RESULTS[name]) for name in ("analyse", "plan", "time", "distil", "export")}
        models = {"parent": self.parent[0], "child": self.child[0]}
        self.summary = write_fusion_report(self.workdir, self.setup.config, models, table["rows"], results)
        self.progress.line((self.workdir / "report.md").read_text(encoding="utf-8"))
        self.progress.line(f"report.md, its pictures, summary.json and the stages' folders are in {self.workdir}")
