"""Sessions on arrays in memory, several in one process (`session_arrays_program.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest

PROGRAM = Path(__file__).with_name("session_arrays_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = processes.run([PROGRAM, str(tmp_path_factory.mktemp("session") / "run")])
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_predictions_are_those_of_the_model_with_averaged_weights(found: Any) -> None:
    assert found["logits"] and found["labels"]
    assert found["rows"] == [1, 3]


def test_examples_of_other_shapes_are_not_predicted(found: Any) -> None:
    said = (
        "SessionError: wrong arrays: expected a dict of arrays by name, as session.{} returns, "
        "given ndarray"
    )
    assert found["no dict"] == [said.format("input.batch(0)"), said.format("theta()")]
    assert found["one example"] == "SessionError: wrong arrays: 'x' has shape [6], expected 2 dims"
    assert found["narrow"].startswith("SessionError: the task cannot compute a batch of shapes")


def test_an_array_that_predict_misses_is_named(found: Any) -> None:
    message = found["not given"]
    assert "session_arrays_program.py:" in message
    assert message.endswith("reads the array 'x', which is not given; given: 'labels'")
    assert found["own KeyError"] == "KeyError: 'no array of the input'"


def test_a_task_is_loaded_without_its_data(found: Any) -> None:
    assert found["classes"] == [2, 2, 2]
    assert (found["completed"], found["open"]) == (2, "REQUIRED")
    assert "data.npy" in found["earlier"] and found["earlier with data"] == 2


def test_classes_that_commands_cannot_import_are_named(found: Any) -> None:
    assert "cannot import: __main__:Mine" not in found["stderr"]
    assert "names classes that other programs cannot import: __main__:Signs" in found["stderr"]


def test_an_evaluation_has_the_figures_of_decoding(found: Any) -> None:
    assert found["scored"] == 7.0 and not found["scored in part"]


def test_an_interruption_waits_for_the_step_and_the_training_continues(found: Any) -> None:
    assert found["interrupted"] == [2, 2] and found["continued"]


def test_the_loss_can_be_traced(found: Any) -> None:
    traced, eager = found["traced"]
    assert traced == pytest.approx(eager, rel=1e-6)


def test_arguments_without_sense_are_sentences(found: Any) -> None:
    assert "model/layers/0/b has the dtype complex64, expected float32" in found["complex"]
    assert "model/layers/0/b has values that are not finite" in found["nan"]
    assert "given an instance of Mine: Session(" in found["instance"]
    assert "given the class int: Session(" in found["class"]
    assert found["minus"] == "SessionError: steps is -1, but must be a whole number of at least 0"
    assert found["true"].startswith("SessionError: steps is True, but must be a whole number")
    assert all("must be None or a whole number > 0" in text for text in found["batches"])
    assert "no evaluation input ['dev']; there are: " in found["names"]


def test_replicas_and_meshes_of_one_process_do_not_meet(found: Any) -> None:
    assert len(found["losses"]) == 6
    for losses in found["losses"]:  # the sums are taken in another order
        assert losses == pytest.approx(found["losses"][0], rel=1e-5)


def test_settings_of_the_process_do_not_stay_for_the_next_session(found: Any) -> None:
    plain, off, deterministic = [False, False], [True, False], [False, True]
    # The mesh of two has a core for each device on a machine with two.
    (*before, last, exact, after) = found["process"]
    assert before == [plain, before[1], plain] and before[1] in (plain, off)
    assert last in (plain, off) and exact == deterministic and after == plain


def test_devices_that_were_set_first_are_kept_without_a_warning(found: Any) -> None:
    assert "its threads stay" not in found["stderr"]
    assert found["none"].endswith("is 0, but must be a whole number from 1 to 4,096")
