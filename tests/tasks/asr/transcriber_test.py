"""Transcripts of recordings: records that can be written as JSON, and words with their times."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from eager_program import EagerProgram
from speech_tasks import TASKS, Letters

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
