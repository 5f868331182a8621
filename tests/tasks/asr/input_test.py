"""Batches of speech: buckets, padding, what is left out, and files that are broken."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import soundfile
from input_parts import part_of
from speech_tasks import task_params

from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.tasks.asr.audio import resample
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.joined_speech import JoinedSpeech
from tekso.tasks.asr.perturbation import Perturbation
from tekso.tasks.asr.sources import AsteriskPrompts, TranscriptFiles

RNG = np.random.default_rng(0)
TEXTS = ["".join(RNG.choice(list(asterisk_folder.LETTERS), RNG.integers(1, 9))) for _ in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asterisk")
    asterisk_folder.write(path, TEXTS)
    return path


def params(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "corpus": AsteriskPrompts.Params(folder=str(folder), dev_fraction=0.2),
        "sample_rate": 8000,
        "max_seconds": 0.8,
        "max_labels": 12,
        "bounds_s": [0.4],
        "batch_size": 3,
        "fill": "seconds",
    }
    return BucketedSpeech.Params(**{**given, **changes})


def test_every_utterance_is_once_in_an_epoch_with_its_samples_and_labels(folder: Path) -> None:
    input: Any = params(folder, order="once").instantiate()
    seen = []
    for step in range(input.num_batches):
        batch = input.batch(step)
        assert batch["samples"].shape in ((6, 3200), (3, 6400))
        assert batch["labels"].shape[1] == 12 * batch["samples"].shape[1] // 6400
        for row, example in input.examples_of(step):
            text = input.text(example)
            size = batch["num_samples"][row]
            expected = asterisk_folder.tones_of(text)
            assert size == len(expected) and not batch["samples"][row, size:].any()
            np.testing.assert_allclose(batch["samples"][row, :size], expected, atol=1e-4)
            labels = batch["labels"][row, : batch["num_labels"][row]]
            assert input.tokenizer.decode(labels) == text
            assert batch["weights"][row] == 1
            seen.append(example)
        assert batch["weights"].sum() == (~input.is_padding(step)).sum()
    assert sorted(seen) == list(range(input.num_examples))
    assert input.num_too_long == sum(len(t) > 6 for t in TEXTS if _in_train(folder, t))
    assert "too long" in input.describe()


def _in_train(folder: Path, text: str) -> bool:
    source: Any = AsteriskPrompts.Params(folder=str(folder), dev_fraction=0.2).instantiate()
    return bool(source.in_split(text, "train"))


def test_files_give_the_batches_of_memory_and_parts_give_the_whole(folder: Path) -> None:
    memory: Any = params(folder).instantiate(seed=2)
    files: Any = params(folder, keep="files").instantiate(seed=2)
    for step in range(4):
        one, other = memory.batch(step), files.batch(step)
        for name, array in one.items():
            np.testing.assert_allclose(other[name], array, atol=1e-6)
        halves = [part_of(memory, step, part, 2) for part in range(2)]
        for name, array in one.items():
            np.testing.assert_array_equal(np.concatenate([h[name] for h in halves]), array)


def test_held_out_texts_are_not_in_the_training_data(folder: Path) -> None:
    train = params(folder)
    dev: Any = HeldOut.Params().instantiate(train=train)
    own = {dev.inner.text(i) for i in range(dev.inner.num_examples)}
    input: Any = train.instantiate()
    trained = {input.text(i) for i in range(input.num_examples)}
    assert own and trained and not own & trained
    assert dev.tokenizer.fingerprint() == input.tokenizer.fingerprint()


def test_utterances_of_a_table_are_named_by_their_audio_files(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "first.wav", asterisk_folder.tones_of("ab"), 8000)
    soundfile.write(tmp_path / "second.wav", asterisk_folder.tones_of("cd"), 8000)
    table = tmp_path / "table.tsv"
    table.write_text("path\ttext\nfirst.wav\tab\nsecond.wav\tcd\n")
    corpus = TranscriptFiles.Params(files=str(table), dev_fraction=0.0, test_fraction=0.0)
    input: Any = params(tmp_path, corpus=corpus).instantiate()
    names = [str(tmp_path / "first.wav"), str(tmp_path / "second.wav")]
    assert [input.origin(i) for i in range(2)] == names
    task: Any = task_params(**{"model.vocab_size": 6}).instantiate()
    assert task.setting_to_try({"dev": input}) == f'task.decode=["{names[0]}"]'
    joined = JoinedSpeech.Params(sources=[corpus])
    assert params(tmp_path, corpus=joined).instantiate().audio_file(1) == names[1]


def test_broken_files_are_named_counted_and_skipped(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path, TEXTS)
    train: Any = params(tmp_path).instantiate()
    names = [train.origin(i) for i in range(3)]
    Path(names[0]).write_bytes(b"")
    Path(names[1]).write_bytes(b"RIFF broken")
    input: Any = params(tmp_path).instantiate()
    assert input.num_examples == train.num_examples - 2
    assert input.skipped().count == 2 and "2 skipped" in input.describe()
    assert {skip.file for skip in input.skipped().named} == set(names[:2])
    with pytest.raises(InputError, match=r"more than .*max_skipped=1 are malformed"):
        params(tmp_path, **{"corpus": AsteriskPrompts.Params(
            folder=str(tmp_path), dev_fraction=0.2, max_skipped=1
        )}).instantiate()  # fmt: skip


def test_a_split_in_which_all_is_too_long_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no utterance is left; \d+ are longer than 0.05 s"):
        params(folder, max_seconds=0.05).instantiate()


def test_the_signature_is_that_of_the_longest_bucket(folder: Path) -> None:
    given = params(folder, order="once")
    wanted = {name: (shape, dtype) for name, (shape, dtype) in BucketedSpeech.signature(
        given).items()}  # fmt: skip
    input: Any = given.instantiate()
    last = input.batch(input.num_batches - 1)
    assert {name: (array.shape, array.dtype) for name, array in last.items()} == wanted


def test_training_recordings_are_perturbed_anew_in_every_epoch(folder: Path) -> None:
    perturb = Perturbation.Params(speeds=[0.8, 1.25], snr_db=[10.0, 20.0])
    input: Any = params(folder, perturb=perturb).instantiate(seed=3)
    plain: Any = params(folder, order="once").instantiate()
    speeds: dict[tuple[str, int], float] = {}
    for step in range(2 * input._buckets.num_batches):
        batch = input.batch(step)
        for part in range(3):
            own = part_of(input, step, part=part, parts=3)
            np.testing.assert_array_equal(own["samples"], np.array_split(batch["samples"], 3)[part])
        for row, example in input.examples_of(step):
            size = batch["num_samples"][row]
            clean = asterisk_folder.tones_of(input.text(example))
            speed = min((0.8, 1.25), key=lambda s: abs(len(clean) / s - size))
            assert size == -(-len(clean) * 100 // round(100 * speed)) <= batch["samples"].shape[1]
            epoch = step // input._buckets.num_batches
            speeds[input.text(example), epoch] = speed
            noise = batch["samples"][row, :size] - resample(clean, round(100 * speed), 100)
            ratio = 10 * np.log10(np.mean(clean**2) / np.mean(noise**2))
            assert 9.0 < ratio < 21.0
    texts = {text for text, _ in speeds}
    changed = [speeds[text, 0] != speeds[text, 1] for text in texts]
    assert 0.2 < np.mean(changed) < 0.8 and {*speeds.values()} == {0.8, 1.25}
    again = params(folder, perturb=perturb).instantiate(seed=3).batch(1)
    np.testing.assert_array_equal(again["samples"], input.batch(1)["samples"])
    held: Any = HeldOut.Params().instantiate(train=params(folder, perturb=perturb))
    assert held.inner._perturbation is None and plain.num_too_long < input.num_too_long


@pytest.mark.parametrize(("speed", "size"), [(0.905, 11050), (0.995, 10051), (1.0, 10000)])
def test_a_recording_has_the_speed_of_the_params_and_at_most_the_stretched_length(
    speed: float, size: int
) -> None:
    perturbation = Perturbation.Params(speeds=[speed]).instantiate()
    found = perturbation.apply(np.ones(10_000, np.float32), 1)
    assert len(found) == size <= math.ceil(10_000 * perturbation.stretch)


def test_speeds_and_ratios_are_checked(folder: Path) -> None:
    for change, reason in (
        ({"speeds": [0.9, 3.0]}, "speeds has 3.0, must be in"),
        ({"snr_db": [20.0, 5.0]}, "must be two ascending numbers"),
    ):
        with pytest.raises(ValueError, match=reason):
            params(folder, perturb=Perturbation.Params(**change)).instantiate()
