from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import processes
import pytest

from tekso.framework.run import lab as lab_module
from tekso.framework.run.lab import Lab, Shown, params_html
from tekso.framework.run.session_batches import SessionError
from tekso.framework.run.session_records import SessionRecords

RECORD = {
    "model": "lm.some.Model",
    "owners": {"": "a:Tree", "task": "b:Task", "task.layers[0]": "c:Layer", "run": "d:Run"},
    "params": [
        {"path": "task.dim", "value": "'<b>'", "doc": "Size.", "origin": "lab.py:3"},
        {"path": "task.layers[0].rate", "value": "0.1", "doc": "Rate.", "origin": "default"},
        {"path": "run.steps", "value": "7", "doc": "Steps.", "origin": "default"},
    ],
}


class Outline(HTMLParser):
    """The names of nodes and fields with their depth."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.found, self.wanted = 0, list[tuple[int, str]](), ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.depth += tag == "details"
        self.wanted = tag if tag in ("b", "td") else self.wanted

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "details"

    def handle_data(self, data: str) -> None:
        if self.wanted:
            self.found.append((self.depth, data))
            self.wanted = ""


def lab_of(session: Any) -> Lab:
    """Returns a lab with a session that is not built."""
    lab = Lab.__new__(Lab)
    lab.session, lab._title = session, "m"
    session._records = SessionRecords(cast(Any, None), begin=0.0)
    lab._records, lab._num_recorded, lab._evaluations = [], 0, []
    return lab


def test_params_are_nested_and_show_values_origins_and_docs() -> None:
    outline = Outline()
    outline.feed(params_html(RECORD))
    assert outline.depth == 0
    assert outline.found == [
        (1, "lm.some.Model"),
        (2, "task"), (2, "dim"), (2, "'<b>'"), (2, "[lab.py:3] Size."),
        (3, "layers[0]"), (3, "rate"), (3, "0.1"), (3, "Rate."),
        (2, "run"), (2, "steps"), (2, "7"), (2, "Steps."),
    ]  # fmt: skip
    assert params_html(RECORD).count("<details open>") == 1


def test_a_lab_trains_evaluates_samples_and_plots(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = "".join(f"line {i} of a text\n" for i in range(900))
    (tmp_path / "text" / "a.txt").write_text(text)
    program = Path(__file__).with_name("lab_program.py")
    done = processes.run([program, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "<summary><b>lm.text_files.Bytes</b>" in found["params"]
    assert "lab_program.py:" in found["params"] and "Number of training steps." in found["params"]
    assert "total: " in found["model"] and found["before"] == "nothing to plot: call fit first"
    assert found["fit"].startswith("curves of lm.text_files.Bytes: loss ")
    assert found["fit"].endswith("at step 3") and found["more"].endswith("at step 5")
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 5
    assert found["records"] == [*([i, "train"] for i in range(1, 6)), [5, "dev"]]
    assert len(found["history"]) == 5 and found["evaluated"]["dev"]["loss"] > 0
    assert found["plot"] == b"\x89PNG\r\n\x1a\n".hex() and found["sample"].strip()
    assert ".decode() (" in found["nothing"] and " returned None: return" in found["nothing"]
    assert found["rest"] == [6, "fit(4) trains 1 step: run.steps ends at 6"]
    assert found["end"] == (
        "cannot train 2 further steps: 6 of run.steps=6 are done. For more, build a session with a "
        'larger run.steps, {"run.steps": 8}, and give it these weights: '
        "new_session.assign(lab.session.theta()). To keep the state of the optimizer too, write "
        "lab.session.save('runs/mine'), and continue it with tekso-trainer --logdir=runs/mine "
        "--steps=8"
    )
    assert found["half"] == "steps is 1.5, but must be a whole number of at least 0"
    assert found["text"] == "steps is '3', but must be a whole number of at least 0"


def test_an_input_that_ends_before_the_run_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_module.task_results, "count", lambda task, batch: (1, "examples"))
    asked: list[int] = []
    session = SimpleNamespace(
        step=2,
        task=None,
        input=SimpleNamespace(batch=lambda number: {}, num_batches=2),
        tree=SimpleNamespace(run=SimpleNamespace(steps=9)),
        history=[],
    )

    def train(steps: int) -> list[dict[str, float]]:
        asked.append(steps)
        session.step += steps
        return [{"loss": 1.0}] * steps

    session.train = train
    lab = lab_of(session)
    with pytest.raises(SessionError, match=r"2 of run\.steps=9 .* the input has only 2 b"):
        lab.fit(5)
    session.input.num_batches = 5
    lab.fit(5)
    assert sum(asked) == 3
    assert "fit(5) trains 3 steps: the input ends at 5" in capsys.readouterr().out


def test_settings_of_a_lab_that_are_no_mapping_are_an_error() -> None:
    with pytest.raises(
        SessionError, match=r"settings are \{path: value\}.*given list \['run.steps=1'\]"
    ):
        Lab("image.digits.Mlp", set=["run.steps=1"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "named"), [(None, "None"), (3, "int"), (Lab, "Lab")])
def test_a_lab_of_no_experiment_is_answered_with_lab(given: Any, named: str) -> None:
    with pytest.raises(SessionError) as caught:
        Lab(given)
    message = str(caught.value)
    assert message.startswith("Lab expects the key or the class of an Experiment, given ")
    assert named in message and message.endswith(': Lab("lm.text_files.Bytes") or Lab(Mine)')


def test_a_result_that_is_called_is_answered_with_the_attribute() -> None:
    with pytest.raises(TypeError, match=r"^this is a result, .* write lab\.params, without \(\)$"):
        Shown("params")()  # type: ignore[operator]


def test_a_notebook_shows_the_curves_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    handle = SimpleNamespace(update=shown.append)
    ipython: Any = ModuleType("IPython")
    ipython.version_info = (9, 0)  # matplotlib reads it
    ipython.display = SimpleNamespace(display=lambda first, **options: handle)
    ipython.get_ipython = lambda: SimpleNamespace(kernel=1)
    monkeypatch.setitem(sys.modules, "IPython", ipython)

    class Session:
        def __init__(self) -> None:
            self.step, self.asked = 0, list[int]()
            self.history: list[dict[str, float]] = []
            self.task = SimpleNamespace(count=lambda batch: (1, "examples"))
            self.input = SimpleNamespace(batch=lambda number: {}, num_batches=None)
            self.tree = SimpleNamespace(run=SimpleNamespace(steps=9))

        def train(self, steps: int) -> list[dict[str, float]]:
            self.asked.append(steps)
            self.step += steps
            self.history += [{"loss": 1.0 / self.step}] * steps
            if self.step == 5:
                raise KeyboardInterrupt
            return self.history[-steps:]

    lab = lab_of(Session())
    assert lab.fit(3).text == ""
    assert lab.session.asked == [1, 1, 1]  # type: ignore[attr-defined]
    assert all(isinstance(one, Shown) and one.png for one in shown) and len(shown) >= 2
    drawn = len(shown)
    with pytest.raises(KeyboardInterrupt):
        lab.fit(4)
    assert len(shown) > drawn and shown[-1].text.endswith("loss 0.2000 at step 5")
    assert lab.session._records._seconds["other"] > 0.0  # the time of the pictures
    lab.session.train(1)
    assert [record["step"] for record in lab.records] == [1, 2, 3, 4, 5, 6]
    ipython.get_ipython = lambda: SimpleNamespace()  # a terminal
    assert lab_module._live_display() is None


def test_records_are_in_the_order_of_the_steps_and_made_once() -> None:
    session = SimpleNamespace(
        step=0,
        history=[],
        eval_inputs={"dev": None},
        evaluate=lambda *args, **kwargs: {"loss": 2.0},
    )

    def train(steps: int) -> None:
        session.step += steps
        session.history += [{"loss": 1.0}] * steps

    lab = lab_of(session)
    lab.evaluate()
    train(2)
    lab.evaluate()
    train(1)
    before = [*lab.records]
    train(1)
    lab.evaluate()
    assert [(record["step"], record["split"]) for record in lab.records] == [
        (0, "dev"), (1, "train"), (2, "train"), (2, "dev"), (3, "train"), (4, "train"), (4, "dev")
    ]  # fmt: skip
    assert all(one is same for one, same in zip(before, lab.records, strict=False))
    lab.records.clear()  # a list of the caller
    assert len(lab.records) == 7


def test_only_a_result_without_content_has_no_output_in_a_notebook() -> None:
    Shown("")._ipython_display_()
    for result in (Shown("text"), Shown("", html="<p>"), Shown("", png=b"PNG")):
        with pytest.raises(NotImplementedError):  # then IPython shows it by its other methods
            result._ipython_display_()


def test_an_attribute_of_the_session_is_named() -> None:
    lab = Lab.__new__(Lab)
    lab.session = SimpleNamespace(predict=None)  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"its session has: lab\.session\.predict$"):
        getattr(lab, "predict")  # noqa: B009
    with pytest.raises(AttributeError, match=r"'summary': lab\.model\(\) shows the weights$"):
        getattr(lab, "summary")  # noqa: B009
    with pytest.raises(AttributeError, match=r"'curves'; it has: .*model.*, session$"):
        getattr(lab, "curves")  # noqa: B009
    assert not hasattr(lab, "_repr_html_")
