"""Works with an experiment in a notebook: Params with origins, training with a live plot, samples.

    lab = Lab("lm.python_source.Tiny", set={"input.batch_size": 8})
    lab.params          # a tree that opens on a click
    lab.fit(50)         # draws the curves while it trains
    lab.sample()
    lab.session         # weights, losses, gradients: see session.py

Results show themselves in a notebook, and are text elsewhere.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from tekso.framework import draws, notebook, task_results
from tekso.framework.counting import counted
from tekso.framework.experiment import Experiment
from tekso.framework.params.origins import hide_from_origins
from tekso.framework.registry import key_of
from tekso.framework.run import inspection, session, session_arguments
from tekso.framework.run.foreign_calls import answering, attribute_hint
from tekso.framework.run.metrics_log import SPLIT, STEP, TRAIN
from tekso.framework.run.report import curves, lines
from tekso.framework.run.session import Session
from tekso.framework.run.session_batches import SessionError, too_many

for _file in (__file__, session.__file__):  # settings come from the notebook
    hide_from_origins(_file)

_LINES_OF_FIT = 10
_PLOT_EVERY_S = 2.0


@dataclasses.dataclass(frozen=True)
class Shown:
    """A result that a notebook shows as HTML or as a picture, and everything else as text.

    A notebook shows no output for an empty one.

    Attributes:
      text: the text.
      html: the HTML; "": none.
      png: the bytes of a PNG; None: no picture.
    """

    text: str
    html: str = ""
    png: bytes | None = None

    def __repr__(self) -> str:
        """Returns the text."""
        return self.text

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Raises a TypeError, as for `lab.params()`.

            Raises:
              TypeError: always.
            """
            raise TypeError("this is a result, not a method: write lab.params, without ()")

    def _ipython_display_(self) -> None:
        if self.text or self.html or self.png:
            raise NotImplementedError  # so that IPython shows it in its own way

    def _repr_html_(self) -> str | None:
        return self.html or None

    def _repr_png_(self) -> bytes | None:
        return self.png


class Lab:
    """An experiment in a notebook, with initialized weights.

    Args:
      experiment: key of a registered experiment, or the class of an experiment.
      set: changes to its Params, {path: value}.
      cpu_devices: number of logical CPU devices; None: as many as the execution needs.

    Attributes:
      session: the session that trains; its weights, losses and gradients.

    Raises:
      SessionError: the experiment is neither a key nor a class, or `set` is no mapping.
      ValueError: as `Session`.
    """

    @answering
    def __init__(
        self,
        experiment: str | type[Experiment],
        set: Mapping[str, Any] | None = None,
        *,
        cpu_devices: int | None = None,
    ) -> None:
        session_arguments.class_of(experiment, caller="Lab")
        self.session = Session(experiment, set, cpu_devices=cpu_devices)
        self._records: list[dict[str, Any]] = []
        self._num_recorded = 0  # steps
        # Evaluations that are not in the records yet, each with the number of steps before it.
        self._evaluations: list[tuple[int, dict[str, Any]]] = []
        self._title = experiment if isinstance(experiment, str) else key_of(experiment)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an AttributeError that names the attribute of the session, if it has one."""
            message = f"a Lab has no attribute {name!r}"
            own = self.__dict__.get("session")
            if own is not None and not name.startswith("_"):
                if hasattr(own, name):
                    message += f", but its session has: lab.session.{name}"
                elif hint := attribute_hint(self, name):
                    message += hint
                else:
                    names = [each for each in dir(type(self)) if not each.startswith("_")]
                    message += f"; it has: {', '.join(names)}, session"
            raise AttributeError(message)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A list of the figures of all steps and evaluations so far, as in `metrics.jsonl`."""
        history = self.session.history
        for end, evaluation in (*self._evaluations, (len(history), None)):
            steps = enumerate(history[self._num_recorded : end], start=self._num_recorded + 1)
            self._records += ({STEP: step, SPLIT: TRAIN, **figures} for step, figures in steps)
            self._records += [evaluation] if evaluation is not None else []
            self._num_recorded = end
        self._evaluations.clear()
        return list(self._records)  # a caller may change the list

    @property
    def params(self) -> Shown:
        """All Params with their docs, and where each was set."""
        record = inspection.params_record(self._title, self.session.tree)
        return Shown(inspection.params_text(record), params_html(record))

    def model(self) -> Shown:
        """Returns the table of the weights."""
        record = inspection.model_record(self._title, self.session.task)
        text = inspection.model_text(record)
        return Shown(text, f"<pre>{escape(text)}</pre>")

    @answering
    def fit(self, steps: int) -> Shown:
        """Trains some steps, and returns the curves; a notebook shows them meanwhile.

        Outside of a notebook, it prints some lines. An interruption takes effect at the end of a
        step; call `fit` again to continue. If the run or its input has fewer steps left, it trains
        these, and prints a note.

        Raises:
          KeyboardInterrupt: it was interrupted; the curves have all steps that were done.
          SessionError: no step is left, or as `Session.train`.
          ValueError: as `Session.train`.
        """
        done, limit = self.session.step, self.session.tree.run.steps
        batches = self.session.input.num_batches
        left = (limit if batches is None else min(limit, batches)) - done
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
            self.session.train(steps)  # raises an error that says why
        if steps > left == 0:
            raise SessionError(too_many(steps, done, limit, batches, session="lab.session"))
        if steps > left:
            of = "run.steps" if left == limit - done else "the input"
            print(f"fit({steps}) trains {counted(left, 'step')}: {of} ends at {done + left}")
            steps = left
        with self.session._records.rest():  # the pictures and the lines
            return self._fit(steps)

    def _fit(self, steps: int) -> Shown:
        update = _live_display()
        unit = task_results.count(self.session.task, self.session.input.batch(0))[1]
        every, end, drawn = -(-steps // _LINES_OF_FIT), self.session.step + steps, -_PLOT_EVERY_S
        try:
            while (done := self.session.step) < end:
                # A notebook's plot is drawn every few seconds; a line is of the last of some steps.
                found = self.session.train(min(1 if update else every, end - done))
                if update is None:
                    self._print(found[-1], end, unit)
                elif time.perf_counter() - drawn >= _PLOT_EVERY_S:
                    update(self.plot())
                    drawn = time.perf_counter()
        finally:  # also after an interruption
            if update is not None:
                update(self.plot())
        return self.plot() if update is None else Shown("")

    def _print(self, figures: Mapping[str, float], end: int, unit: str) -> None:
        line = lines.train_line(
            self.session.step, end, figures, speed=None, unit=unit, wait_share=None,
            seconds_left=None,
        )  # fmt: skip
        print(line)

    @answering
    def sample(self) -> Shown:
        """Returns what the task decodes, as at the end of a run.

        Raises:
          SessionError: the task decodes nothing.
        """
        of = self.session
        with draws.warning_of_repeats("in decode"):
            decoded = task_results.decode(of.task, of.program, of.input)
        if decoded is None:
            raise SessionError(self.session.task.why_nothing_decoded())
        return Shown(decoded.text, f"<pre>{escape(decoded.text)}</pre>")

    @answering
    def evaluate(self, *names: str, max_batches: int | None = None) -> dict[str, dict[str, float]]:
        """Evaluates evaluation inputs; returns {name: figures}.

        Args:
          *names: names of evaluation inputs; by default all.
          max_batches: number of batches of each; None: all, and scores of decoded text.

        Raises:
          SessionError: there is no such evaluation input.
        """
        found: dict[str, dict[str, float]] = {}
        for name in names or tuple(self.session.eval_inputs):
            found[name] = self.session.evaluate(name, max_batches=max_batches)
            record = {STEP: self.session.step, SPLIT: name, **found[name]}
            self._evaluations.append((len(self.session.history), record))
        return found

    def plot(self) -> Shown:
        """Returns the curves of all steps and evaluations so far."""
        records = self.records
        picture = curves.draw(records, title=self._title)
        if picture is None:
            return Shown("nothing to plot: call fit first")
        last = next((r for r in reversed(records) if r[SPLIT] == TRAIN), None)
        text = f"loss {lines.number(last['loss'])} at step {last[STEP]}" if last else "evaluations"
        return Shown(f"curves of {self._title}: {text}", png=picture)


def _live_display() -> Callable[[Shown], None] | None:
    """Returns a function that shows a result in place of the one before; None: no notebook."""
    ipython = notebook.ipython_of_notebook()
    if ipython is None:
        return None
    handle = ipython.display.display({"text/plain": ""}, raw=True, display_id=True)

    def update(shown: Shown) -> None:
        handle.update(shown)

    return update


def params_html(record: Mapping[str, Any]) -> str:
    """Returns Params as nested HTML details elements, the first level open.

    Args:
      record: the result of `inspection.params_record`.
    """
    owners: dict[str, str] = record["owners"]
    rows: dict[str, list[Mapping[str, Any]]] = {path: [] for path in owners}
    inside: dict[str, list[str]] = {path: [] for path in owners}
    for path in owners:
        if path:
            inside[_above(path, [other for other in owners if other != path])].append(path)
    for row in record["params"]:
        rows[_above(row["path"], owners)].append(row)

    def node(path: str, parent: str) -> str:
        name = escape(path[len(parent) :].lstrip(".") or record["model"])
        table = "".join(_row(row, path) for row in rows[path])
        children = "".join(node(child, path) for child in inside[path])
        return (
            f"<details{' open' if not path else ''}><summary><b>{name}</b> "
            f"<code>{escape(owners[path])}</code></summary>"
            f'<table>{table}</table><div style="margin-left:1.5em">{children}</div></details>'
        )

    return node("", "")


def _above(path: str, nodes: Iterable[str]) -> str:
    """Returns the nearest node that contains a path."""
    return max((n for n in nodes if not n or path.startswith((f"{n}.", f"{n}["))), key=len)


def _row(row: Mapping[str, Any], parent: str) -> str:
    name = row["path"][len(parent) :].lstrip(".")
    origin = "" if row["origin"] == "default" else f"[{row['origin']}] "
    cells: Sequence[str] = (name, row["value"], f"{origin}{row['doc']}")
    return f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in cells)}</tr>"
