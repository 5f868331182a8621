"""Transcripts of recordings: records that can be written as JSON, and words with their times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from eager_program import EagerProgram
from speech_tasks import TASKS, Letters

from tekso.tasks.asr.transcriber import Transcript

EMPTY = np.zeros(0, np.float32)


@pytest.mark.parametrize("kind", TASKS)
def test_an_empty_recording_has_a_record_without_infinite_numbers(kind: str) -> None:
    beam = "transcriber.search.beam_size" if kind == "las" else "transcriber.beam_size"
    changes = {"model.vocab_size": 5, beam: 2, "transcriber.num_hypotheses": 2}
    task: Any = TASKS[kind](**changes).instantiate()
    program: Any = EagerProgram(task.init(seed=1))
    record = task.transcriber.record(program, EMPTY, Letters())
    assert json.loads(json.dumps(record, allow_nan=False))["text"] == ""
    assert all(text == "" for text, _ in record["hypotheses"])


def test_hypotheses_of_a_record_have_different_texts() -> None:
    params = {"model.vocab_size": 5, "transcriber.beam_size": 3, "transcriber.num_hypotheses": 3}
    task: Any = TASKS["ctc"](**params).instantiate()

    class Words:
        """Token 0 is a space."""

        def decode(self, ids: Sequence[int]) -> str:
            """Returns the letters of the tokens."""
            return "".join(" abcd"[i] for i in ids)

    labels = {(1, 2): -0.5, (2,): -2.0, (1, 2, 0): -3.0}
    found = [Transcript(one, log_prob) for one, log_prob in labels.items()]
    record = task.transcriber.record_of(found, Words())
    assert record["hypotheses"] == [["ab", -0.5], ["b", -2.0]]
