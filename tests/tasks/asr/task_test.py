"""The speech tasks: losses, metrics, and small models that learn tones for letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import soundfile
import tensorflow as tf
from speech_tasks import STEPS, TASKS, Tones, las_params, task_params, transducer_params

from tekso.framework.context import StepContext
from tekso.framework.input.held_out import HeldOut
from tekso.framework.run.evaluation import EvaluationError, evaluate
from tekso.framework.run.session import Session
from tekso.models.layers.spec_augment import SpecAugment
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.task import CtcTask
from tekso.tasks.asr.transcriber import words_of
from tekso.tasks.asr.word_errors import best_constant, word_errors


def batch(rng: np.random.Generator, frames: int = 40) -> dict[str, np.ndarray]:
    num_samples = 201 + 80 * np.array([frames - 1, 29, 19])
    return {
        "samples": rng.normal(0, 0.1, (3, 201 + 80 * (frames - 1))).astype(np.float32),
        "num_samples": num_samples.astype(np.int32),
        "labels": rng.integers(0, 5, (3, 4)).astype(np.int32),
        "num_labels": np.array([3, 4, 0], np.int32),
        "weights": np.ones(3, np.float32),
    }


@pytest.mark.parametrize("kind", TASKS)
def test_the_loss_is_that_of_each_utterance_alone_whatever_its_padding(kind: str) -> None:
    task: Any = TASKS[kind](**{"model.vocab_size": 5}).instantiate()
    theta, given = task.init(seed=1), batch(np.random.default_rng(2))
    whole = task.loss(theta, given, StepContext())
    ends = 3 if kind == "las" else 1  # every text has an end token; or the empty one counts 1
    assert float(task.loss_weight(given)) == 3 + 4 + ends
    alone = []
    for i, size in enumerate(given["num_samples"]):
        own = {name: array[i : i + 1] for name, array in given.items()}
        own["samples"] = own["samples"][:, :size]
        alone.append(float(task.loss(theta, own, StepContext()).loss_sum))
    assert float(whole.loss_sum) == pytest.approx(sum(alone), rel=1e-5)
    noisy = dict(given, samples=given["samples"].copy())
    for i, size in enumerate(given["num_samples"]):
        noisy["samples"][i, size:] = 0.9
    assert float(task.loss(theta, noisy, StepContext()).loss_sum) == pytest.approx(
        float(whole.loss_sum), rel=1e-6
    )


class OneDevice:
    """Evaluates on one device."""

    def __init__(self, task: Any, theta: Any) -> None:
        self.task, self.theta = task, theta

    def eval_step(self, batch: Any) -> Any:
        sums = self.task.loss(self.theta, batch, StepContext())
        return {"loss": (sums.loss_sum, self.task.loss_weight(batch)), **sums.metrics}


def test_an_utterance_without_an_alignment_does_not_count_in_the_loss() -> None:
    task: Any = task_params(**{"model.vocab_size": 5}).instantiate()
    theta, given = task.init(seed=1), batch(np.random.default_rng(2))
    given["num_samples"] = np.array([given["num_samples"][0], 600, 100], np.int32)
    with tf.GradientTape() as tape:
        tape.watch(tf.nest.flatten(theta))
        sums = task.loss(theta, given, StepContext())
    assert float(task.loss_weight(given)) == 3 + 0 + 1  # 4 labels without frames
    with pytest.raises(EvaluationError, match="or does loss_weight exclude all of it"):
        second = {name: array[1:2] for name, array in given.items()}
        evaluate(OneDevice(task, theta), task, iter([second]), name="dev")
    first = {name: array[:1] for name, array in given.items()}
    alone = task.loss(theta, first, StepContext())
    assert float(sums.loss_sum) == pytest.approx(float(alone.loss_sum), rel=1e-5)
    one, two = sums.metrics["impossible"]
    assert (float(one), float(two)) == (1.0, 3.0)  # the third has neither frames nor labels
    gradients = tape.gradient(sums.loss_sum, tf.nest.flatten(theta))
    assert all(np.isfinite(g.numpy()).all() for g in gradients)


def test_a_transducer_needs_one_frame_for_all_labels() -> None:
    task: Any = transducer_params(**{"model.vocab_size": 5}).instantiate()
    theta, given = task.init(seed=1), batch(np.random.default_rng(2))
    given["num_samples"] = np.array([given["num_samples"][0], 600, 100], np.int32)
    assert float(task.loss_weight(given)) == 3 + 4 + 0
    sums = task.loss(theta, given, StepContext())
    assert np.isfinite(float(sums.loss_sum))
    assert [float(x) for x in sums.metrics["impossible"]] == [1.0, 3.0]


def test_files_that_are_too_long_are_named_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "long.wav")
    soundfile.write(path, np.zeros(8000, "f4"), 8000)
    monkeypatch.setattr("tekso.tasks.asr.speech_task.read_audio", None)
    task: Any = task_params(**{"model.vocab_size": 5, "longest_file_s": 0.5}).instantiate()
    found = task.transcribe_file(None, None, path)
    assert found["error"] == (
        "1 s, longer than longest_file_s=0.5: cut it into parts, or set a higher limit"
    )


def test_ctc_and_attention_are_mixed_by_weight() -> None:
    given = batch(np.random.default_rng(2))
    found = {}
    for weight in (1e-9, 0.25, 1.0):
        task: Any = las_params(**{"model.vocab_size": 5, "model.ctc_weight": weight}).instantiate()
        theta = task.init(seed=1)
        found[weight] = float(task.loss(theta, given, StepContext()).loss_sum)
    assert found[0.25] == pytest.approx(0.25 * found[1.0] + 0.75 * found[1e-9], rel=1e-5)

    ctc: Any = task_params(**{"model.vocab_size": 5}).instantiate()
    same = ctc.init(seed=1)
    same.model["encoder"], same.model["output"] = theta.model.encoder, theta.model.ctc
    alone = float(ctc.loss(same, given, StepContext()).loss_sum)
    assert found[1.0] == pytest.approx(alone, rel=1e-5)
    with pytest.raises(ValueError, match=r"ctc_weight is 1.5, must be in 0 … 1"):
        las_params(**{"model.vocab_size": 5, "model.ctc_weight": 1.5}).instantiate()


class Spelled:
    """A tokenizer whose tokens are parts of words."""

    def decode(self, ids: Any) -> str:
        return "".join(["a", "bc", " ", " d"][i] for i in ids)


def test_words_begin_with_their_first_token() -> None:
    found = words_of([2, 0, 1, 3, 2, 2, 0], [0.04, 0.08, 0.2, 0.3, 0.4, 0.44, 0.5], Spelled())  # type: ignore[arg-type]
    assert found == [["abc", 0.08], ["d", 0.3], ["a", 0.5]]


def test_more_hypotheses_than_the_beam_has_are_refused() -> None:
    changes = {"model.vocab_size": 5, "transcriber.num_hypotheses": 5}
    for make in TASKS.values():
        with pytest.raises(ValueError, match=r"must be at most beam_size, [14]"):
            make(**changes).instantiate()


def test_masks_are_drawn_in_training_only() -> None:
    augment = SpecAugment.Params(time_width=10)
    task: Any = task_params(**{"model.vocab_size": 5, "model.augment": augment}).instantiate()
    theta, given = task.init(seed=1), batch(np.random.default_rng(2))
    plain, *masked = (
        float(task.loss(theta, given, StepContext(mode=mode, step=step, num_examples=3)).loss_sum)
        for mode, step in (("eval", 0), ("eval", 1), ("train", 0), ("train", 1), ("train", 0))
    )
    assert masked[0] == plain and masked[1] != plain
    assert masked[1] != masked[2] and masked[1] == masked[3]


def test_labels_and_rates_that_do_not_fit_are_refused() -> None:
    task: Any = task_params(**{"model.vocab_size": 3}).instantiate()
    with pytest.raises(ValueError, match=r"input.batch\(7\): label [34] is not in 0 to 2"):
        task.check_batch("input.batch(7)", batch(np.random.default_rng(2)))

    class Known:
        vocab_size = 5
        params = BucketedSpeech.Params(sample_rate=16_000)

    with pytest.raises(ValueError, match=r"input.sample_rate is 16000, but .* is 8000"):
        CtcTask.complete(task_params(), Known())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocab_size is 3, but the input has 5 tokens"):
        CtcTask.complete(task_params(**{"model.vocab_size": 3}), Known())  # type: ignore[arg-type]


def test_word_errors_by_kind_and_utterance() -> None:
    references = ["a b c", "d e", "f g h i"]
    errors = word_errors(references, ["a x c", "d e", "f h i j k"])
    assert errors.by_utterance == [1, 0, 3]
    assert errors.figures["wer"] == pytest.approx(4 / 9)
    kinds = [errors.figures[k] for k in ("substitutions", "deletions", "insertions")]
    assert kinds == pytest.approx([1 / 9, 1 / 9, 2 / 9])
    assert errors.figures["cer"] == pytest.approx(6 / 15)
    assert errors.worst(5) == [2, 0]


def test_no_constant_word_is_better_than_the_baseline() -> None:
    references = ["to a to", "a b", "to c", "to"]
    constant = best_constant(references)
    rates = {
        word: word_errors(references, [word] * 4).figures for word in ("to", "a", "b", "c", "d")
    }
    assert constant.word == "to" and constant.figures["constant_wer"] == pytest.approx(5 / 8)
    assert constant.figures["constant_wer"] == pytest.approx(min(r["wer"] for r in rates.values()))
    assert constant.figures["constant_cer"] == pytest.approx(rates["to"]["cer"])
    often = ["to to to", "a", "a b"]  # often in one text helps less than once in two
    assert best_constant(often).word == "a"


@pytest.mark.parametrize("references", [["a", ""], ["a\tb", "a"], ["", "b a", " b  b"]])
def test_the_rates_of_a_constant_word_are_those_of_transcripts(references: list[str]) -> None:
    """Also of texts without words, and of white space that does not separate words."""
    constant = best_constant(references)
    rates = word_errors(references, [constant.word] * len(references)).figures
    assert constant.figures == {"constant_wer": rates["wer"], "constant_cer": rates["cer"]}


class TransducedTones(Tones):
    """The same with a transducer."""

    kind = "transducer"


class AttendedTones(Tones):
    """The same with an attention decoder."""

    kind = "las"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [Tones, TransducedTones, AttendedTones])
def test_a_small_model_learns_to_spell_tones(tmp_path: Path, experiment: type[Tones]) -> None:
    rng = np.random.default_rng(0)
    letters = list(asterisk_folder.LETTERS)
    texts = ["".join(rng.choice(letters, rng.integers(1, 7))) for _ in range(200)]
    asterisk_folder.write(tmp_path, texts)
    steps = STEPS // 2 if experiment is Tones else STEPS  # the other kinds learn more slowly
    settings: dict[str, Any] = {
        "input.corpus.folder": str(tmp_path),
        "input.bounds_s": [0.8],  # one bucket: tracing each takes longer than all steps
        "run.steps": steps,
        "execution.towers": 1,
        "execution.xla": "none",
    }
    session = Session(experiment, settings)
    session.train(steps)
    figures = session.evaluate("dev")
    # Guessing letters has an error rate of about 0.8.
    most = 0.1 if experiment is Tones else 0.7
    assert figures["cer"] < most and figures["impossible"] == 0, figures
    decoded = session.task.decode(session.program, session.input)
    assert decoded is not None
    record = decoded.records[0]
    if experiment is Tones:
        assert record["text"] == record["reference"]
    if experiment is AttendedTones:  # does not know when words are spoken
        assert "words" not in record
    else:
        assert [word for word, _ in record["words"]] == record["text"].split()
        assert all(0 <= second < 0.8 for _, second in record["words"])


class Heard:
    """Takes the place of a program: shows what it is given, and hears nothing."""

    def __init__(self) -> None:
        self.recordings: set[bytes] = set()

    def call(self, function: Any, samples: Any, num_samples: Any) -> Any:
        del function
        for row, size in zip(samples.numpy(), num_samples.numpy(), strict=True):
            self.recordings.add(row[:size].tobytes())
        silence = np.zeros([len(samples), 1, 6], np.float32)
        return silence, np.zeros(len(samples), np.int32)


def test_error_rates_are_of_the_batches_of_the_evaluation(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path, [a + b for a in "abcdef" for b in "abcdef"])
    train = (
        Tones()
        .input()
        .set(**{"corpus.folder": str(tmp_path), "corpus.dev_fraction": 0.5, "batch_size": 3})
    )
    held_out: Any = HeldOut.Params(max_batches=2).instantiate(train=train)
    assert held_out.inner.num_batches > 4
    task: Any = task_params(**{"model.vocab_size": 5}).instantiate()
    program = Heard()
    scored = task.score(program, held_out, is_last=True)
    expected = {
        row[:size].tobytes()
        for step in range(2)
        for batch in [held_out.batch(step)]
        for row, size in zip(batch["samples"], batch["num_samples"], strict=True)
    }
    assert len(expected) == 6 and program.recordings == expected
    assert "scored: 6 utterances" in scored.text and scored.figures["deletions"] == 1.0
    (note,) = scored.notes  # six texts of one word each
    assert note.startswith("WER 1.000, CER 1.000; the word ") and note in scored.text
    assert scored.figures["constant_wer"] == pytest.approx(5 / 6)


def test_a_broken_file_gets_a_reason_and_the_others_are_transcribed(tmp_path: Path) -> None:
    (tmp_path / "noise.wav").write_bytes(b"no audio at all")
    soundfile.write(tmp_path / "good.wav", asterisk_folder.tones_of("ab"), 8000)
    names = ["noise.wav", "missing.wav", "good.wav"]
    paths = [str(tmp_path / name) for name in names]
    task: Any = task_params(**{"model.vocab_size": 5, "decode": paths}).instantiate()

    class Letters:
        class tokenizer:  # noqa: N801
            @staticmethod
            def decode(labels: Any) -> str:
                return "".join("abcde"[label] for label in labels)

    program = Heard()
    decoded = task.decode(program, Letters())
    noise, missing, good = decoded.records
    assert "not audio" in noise["error"] and missing["error"] == "No such file or directory"
    assert "text" not in noise and [record["file"] for record in decoded.records] == paths
    assert good == {"kind": "transcript", "file": paths[2], "text": "", "words": []}
    assert len(program.recordings) == 1
    assert decoded.text.splitlines()[1] == f"{paths[1]}: No such file or directory"
