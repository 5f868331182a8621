"""Shallow fusion: searches with a language model against all labellings, scored one by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from speech_tasks import TASKS

from tekso.framework.context import StepContext
from tekso.framework.input.characters import Characters
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Bytes
from tekso.framework.run.session import Session
from tekso.framework.run.trained_models import load_trained
from tekso.framework.trained import TrainedModel
from tekso.models.decoder_only import CAUSAL_LAYER
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.stack import RepeatedStack
from tekso.models.lstm_lm import LstmLm
from tekso.models.transformer_lm import TransformerLm
from tekso.params.asr.prompts import Texts
from tekso.tasks.asr.language_fusion import LanguageFusion
from tekso.tasks.lm.task import LanguageModel

WEIGHT, BONUS = 0.7, 0.4
LSTM = LstmLm.Params(
    embedding_dim=3, stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=4))
)
TRANSFORMER = TransformerLm.Params(
    dim=4,
    stack=RepeatedStack.Params(
        num_layers=2,
        layer=CAUSAL_LAYER.copy().set({"attention.num_heads": 2, "feed_forward.hidden_dim": 6}),
    ),
)


def characters(text: str) -> Characters:
    """Returns a tokenizer: 0 ends a text, 1 is unknown, then come the characters."""
    tokenizer: Characters = Characters.Params().instantiate(
        training=TrainingText(lambda: [text], lambda: text, "a test")
    )
    return tokenizer


def trained(model: Any, tokenizer: Any) -> TrainedModel:
    """Returns a language model with large random weights, so that it has preferences."""
    params = model.copy().set(vocab_size=tokenizer.vocab_size)
    task: Any = LanguageModel.Params(model=params, decode=None).instantiate()
    theta = tf.nest.map_structure(lambda w: 3.0 * w, task.init(seed=5))

    class Known:
        pass

    known: Any = Known()
    known.tokenizer = tokenizer
    return TrainedModel("lm.toy", "runs/lm", task, theta, known)


def log_prob(lm: TrainedModel, labels: tuple[int, ...]) -> float:
    """Returns the log-probability of a text of a's and b's, by the loss of the language model."""
    text = "".join({2: "a", 3: "b"}[label] for label in labels)
    ids = [lm.input.tokenizer.end_id, *lm.input.tokenizer.encode(text)]
    nats = lm.task.model.token_cross_entropy(
        lm.theta.model, tf.constant([ids]), tf.constant([[*ids[1:], ids[0]]]), StepContext()
    )
    return -float(tf.reduce_sum(nats))


def speech_log_prob(task: Any, theta: Any, recording: np.ndarray, labels: tuple[int, ...]) -> float:
    """Returns log P(labels | speech), from the loss of the task."""
    batch = {
        "samples": tf.constant([recording], tf.float32),
        "num_samples": tf.constant([len(recording)]),
        "labels": tf.constant([labels], tf.int32, shape=[1, len(labels)]),
        "num_labels": tf.constant([len(labels)]),
        "weights": tf.ones([1]),
    }
    flow = batch
    for piece in task.model.pieces():
        flow = piece.run(theta.model, flow, StepContext())
    return -float(task.nats(flow, StepContext())[0])


BEAM = {
    "ctc": {"transcriber.beam_size": 40},
    "transducer": {"transcriber.beam_size": 20, "transcriber.max_symbols": 3},
    "las": {
        "transcriber.search.beam_size": 40,
        "transcriber.search.length_normalization": 0.0,
        "transcriber.search.max_length": 4,
    },
}


# Each search and each model once; what a search asks a language model is the same for all.
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param("ctc", LSTM, id="ctc-lstm"),
        pytest.param("las", TRANSFORMER, id="las-transformer"),
        pytest.param("transducer", LSTM, id="transducer-lstm"),
        pytest.param("ctc", TRANSFORMER, id="ctc-transformer", marks=pytest.mark.matrix),
        pytest.param("las", LSTM, id="las-lstm", marks=pytest.mark.matrix),
        pytest.param(
            "transducer", TRANSFORMER, id="transducer-transformer", marks=pytest.mark.matrix
        ),
    ],
)
def test_a_wide_beam_finds_the_best_of_all_labellings(kind: str, model: Any) -> None:
    bonus = 0.0 if kind == "las" else BONUS
    fusion = LanguageFusion.Params(run="runs/lm", weight=WEIGHT, token_bonus=bonus)
    changes = {"model.vocab_size": 4, "transcriber.language_model": fusion, **BEAM[kind]}
    task: Any = TASKS[kind](**changes, **{"transcriber.num_hypotheses": 6}).instantiate()
    theta = tf.nest.map_structure(lambda w: 2.0 * w, task.init(seed=3))
    lm = trained(model, characters("+ab"))  # other ids than those of the recogniser
    task.transcriber.use_trained(lambda path: lm, characters("ab"))
    # With one frame, a transducer has at most max_symbols labels.
    recording = asterisk_folder.tones_of("ab")[: 400 if kind == "transducer" else 1000]
    (found,) = task.transcriber.transcripts(
        EagerProgram(theta), recording[None], np.array([len(recording)], np.int32)
    )
    frames = int(task.model.num_frames(len(recording)))
    assert frames == (1 if kind == "transducer" else 3)
    scores = {}
    for size in range(4):
        for labels in itertools.product((2, 3), repeat=size):
            own = speech_log_prob(task, theta, recording, labels)
            scores[labels] = own + WEIGHT * log_prob(lm, labels) + bonus * size
    best = sorted(scores, key=lambda labels: -scores[labels])
    assert [tuple(one.labels) for one in found[:4]] == best[:4]
    for one in found[:4]:
        assert one.log_prob == pytest.approx(scores[tuple(one.labels)], abs=1e-3)


def errors_of(lm: TrainedModel, tokenizer: Any, **fusion: Any) -> str:
    params = LanguageFusion.Params(run="runs/lm").set(fusion)
    with pytest.raises(ValueError) as raised:
        params.instantiate().load(lambda path: lm, tokenizer, tokenizer.vocab_size)
    return str(raised.value)


def test_a_language_model_that_does_not_fit_is_refused() -> None:
    own, lm = characters("abé"), trained(LSTM, characters("ab "))
    text = errors_of(lm, own)
    assert "run is runs/lm, whose language model lacks 1 of the 3 characters" in text
    assert "('é')" in text and "\n" not in text
    assert "tokenizer (Bytes) is not that of the recogniser (Characters)" in errors_of(
        trained(LSTM, Bytes.Params().instantiate()), own
    )
    assert "is runs/lm, a run of lm.toy, but experiment is lm.other" in errors_of(
        lm, own, experiment="lm.other"
    )
    no_lm = TrainedModel("asr.toy", "runs/lm", TASKS["ctc"](), lm.theta, lm.input)
    assert "a run of asr.toy, which is not a language model" in errors_of(no_lm, own)
    with pytest.raises(ValueError, match=r"weight is -1.0, must be finite and at least 0"):
        LanguageFusion.Params(run="x", weight=-1.0).instantiate()


def test_a_missing_run_is_named_with_its_setting(tmp_path: Path) -> None:
    fusion = LanguageFusion.Params(run=str(tmp_path / "nowhere")).instantiate()
    with pytest.raises(ValueError, match=r"^.*run is .*nowhere: there is no checkpoint in .*"):
        fusion.load(load_trained, characters("ab"), 4)


def test_greedy_search_and_a_bonus_for_attention_are_refused() -> None:
    fusion = LanguageFusion.Params(run="runs/lm", token_bonus=0.5)
    changes = {"model.vocab_size": 5, "transcriber.language_model": fusion}
    for kind in ("ctc", "transducer"):
        with pytest.raises(ValueError, match=r"needs a beam search: set .*beam_size to at least 2"):
            TASKS[kind](**changes).instantiate()
    with pytest.raises(ValueError, match=r"token_bonus is 0.5, must be 0 for an attention decoder"):
        TASKS["las"](**changes).instantiate()


def test_learned_positions_limit_the_length_of_a_text() -> None:
    lm = trained(
        TRANSFORMER.copy().set(positions=LearnedPositions.Params(max_length=3)), characters("ab")
    )
    scores = LanguageFusion.Params(run="x").instantiate().load(lambda path: lm, characters("ab"), 4)
    assert scores.next_scores([(2, 3)]).shape == (1, 5)
    with pytest.raises(ValueError, match="has positions for 3 tokens, but a transcript has more"):
        scores.next_scores([(2, 3, 2)])


@pytest.mark.slow
def test_scores_are_those_of_the_weights_in_the_checkpoint(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path, ["ab" * n + "a" for n in range(1, 4) for _ in range(8)])
    folder = {"input.corpus.corpus.folder": str(tmp_path)}
    session = Session(Texts, {**folder, "input.corpus.corpus.dev_fraction": 0.4})
    session.train(30)
    session.save(str(tmp_path / "lm"))
    fusion = LanguageFusion.Params(run=f"{tmp_path}/lm/last", weight=2.0).instantiate()
    scores = fusion.load(load_trained, session.input.tokenizer, 4)
    after_a = scores.next_scores([(2,)])[0]
    assert after_a[3] > after_a[2] + 1.0  # it has learned that b follows a
