"""Tests of tekso-decode: one output line per input line, and exports with the same outputs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import processes
import pytest

from tekso.framework import registry
from tekso.framework.commands import typed
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoint_files import Description
from tekso.tools import decode

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SETTINGS = [
    "task.model.dim=16",
    "task.model.encoder.num_layers=1",
    "task.model.decoder.num_layers=1",
    "task.model.encoder.layer.attention.num_heads=2",
    "task.model.decoder.layer.attention.num_heads=2",
    "task.model.decoder.layer.memory_attention.num_heads=2",
    "task.scoring=None",
    "task.translator.batch_tokens=64",
    "input.corpus.source_files=train.numbers",
    "input.corpus.target_files=train.words",
    "input.tokenizer.vocab_size=300",
    "input.source_length=24",
    "input.target_length=32",
    "input.bounds=[]",  # one kind of batch is traced
    "*.dropout_rate=0",
    "learner.schedule.warmup_steps=20",
    "learner.schedule.scale=0.03",
    "run.decode_at_end=false",
    "execution.xla=none",
    "execution.towers=1",
]
LINES = [
    b"12\n",
    b"3456\r\n",
    b"\n",
    b"7" * 100_000 + b"\n",
    b"   \n",
    b"8\xff9\n",
    b"1\n",
    b"987",  # no line end
]

# Knows nothing of Tekso: the tokenizer's own model and the JSON beside the SavedModel.
LOADER = """
import json, sys
sys.modules["tekso"] = None  # an import of it is an error
import numpy as np
import sentencepiece
import tensorflow as tf

model = tf.saved_model.load("export")
vocabulary = json.load(open("export/assets/export.json"))["vocabularies"]["source_tokenizer"]
table = [bytes.fromhex(part) for part in vocabulary["bytes_of_ids"]]
tokenizer = sentencepiece.SentencePieceProcessor("export/assets/sentencepiece.model")
rows = [[*tokenizer.encode(text), vocabulary["end_id"]] for text in json.loads(sys.argv[1])]
ids = np.zeros([len(rows), max(map(len, rows))], np.int32)
for into, row in zip(ids, rows):
    into[: len(row)] = row
lengths = np.array([len(row) for row in rows], np.int32)
inputs = dict(source_ids=tf.constant(ids), source_lengths=tf.constant(lengths))
found = model.signatures["translate"](**inputs)
texts = [
    b"".join(table[i] for i in row[0, : n[0]]).decode("utf-8", "replace")
    for row, n in zip(found["ids"].numpy(), found["lengths"].numpy())
]
print(json.dumps({
    "texts": texts,
    "scores": found["scores"].numpy()[:, 0].tolist(),
}))
"""


def run(*words: str, cwd: Path, data: bytes = b"", op_by_op: bool = False) -> tuple[str, str]:
    done = processes.run(words, cwd=cwd, input=data, optimized=False, op_by_op=op_by_op)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def translate(
    folder: Path, *words: str, data: bytes = b"", op_by_op: bool = True
) -> tuple[str, str]:
    words = ("-m", "tekso.tools.decode", "--logdir=run", *words)
    return run(*words, cwd=folder, data=data, op_by_op=op_by_op)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained for a few steps to spell numbers."""
    folder = tmp_path_factory.mktemp("decode")
    numbers = [str(7 * n) for n in range(600)]
    (folder / "train.numbers").write_text("".join(f"{n}\n" for n in numbers))
    words = [" ".join(ONES[int(digit)] for digit in number) for number in numbers]
    (folder / "train.words").write_text("".join(f"{text}\n" for text in words))
    settings = [f"--set={setting}" for setting in SETTINGS]
    model = ["--model=mt.text_files.Base", "--logdir=run", "--steps=320"]
    run("-m", "tekso.tools.trainer", *model, *settings, cwd=folder)
    for name in ("train.numbers", "train.words"):  # a run that is done has no need of its data
        (folder / name).unlink()
    (folder / "in.txt").write_bytes(b"".join(LINES))
    return folder


@pytest.fixture(scope="module")
def translated(trained: Path) -> list[str]:
    """The lines of a file, translated."""
    files = ("--input=in.txt", "--output=out/out.txt")
    printed, messages = translate(trained, *files, op_by_op=False)  # the others are not traced
    assert printed == "" and "Traceback" not in messages
    assert "translated 8 lines" in messages
    assert "2 of them are empty" in messages
    assert "1 of them are too long for the model" in messages
    assert "1 of them have bytes that are not UTF-8" in messages
    assert [path.name for path in (trained / "out").iterdir()] == ["out.txt"]
    text = (trained / "out" / "out.txt").read_bytes().decode()
    assert text.endswith("\n")
    return text[:-1].split("\n")


@pytest.mark.slow
def test_every_line_has_its_translation_and_empty_lines_stay(translated: list[str]) -> None:
    assert len(translated) == len(LINES)
    assert [i for i, text in enumerate(translated) if not text] == [2, 4]
    assert len(set(translated)) > 3


@pytest.mark.slow
def test_a_line_that_is_typed_is_answered_before_the_next_one_and_alike(
    trained: Path, translated: list[str]
) -> None:
    command = shlex.split(processes.forwarding("-m", "tekso.tools.decode", "--logdir=run"))
    process = subprocess.Popen(
        command,
        cwd=trained,
        env={**os.environ, **processes.OP_BY_OP},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    for line, wanted in zip(LINES[:3], translated, strict=False):
        process.stdin.write(line)
        process.stdin.flush()
        assert process.stdout.readline().decode() == f"{wanted}\n"
    rest, messages = process.communicate(b"".join(LINES[3:]), timeout=600)
    assert process.returncode == 0, messages.decode()
    assert rest.decode().split("\n")[:-1] == translated[3:]


@pytest.mark.slow
def test_hypotheses_are_reported_with_their_scores(trained: Path, translated: list[str]) -> None:
    options = ["--beam_size=5", "--num_hypotheses=3"]
    printed, _ = translate(trained, *options, data=b"12\n\n345\n")
    rows = [line.split(" ||| ") for line in printed.splitlines()]
    assert [row[0] for row in rows] == ["0", "0", "0", "1", "2", "2", "2"]
    scores = [float(row[2]) for row in rows]
    assert scores[0] > scores[1] > scores[2] and scores[4] > scores[5] > scores[6]
    assert rows[3][1:] == ["", "0.0000"]


@pytest.mark.slow
def test_samples_are_drawn_instead_and_cannot_be_exported(trained: Path) -> None:
    sampler = "--set=task.translator.search=tekso.models.decoding.sampler:Sampler"
    printed, messages = translate(trained, sampler, "--num_hypotheses=3", data=b"12\n\n345\n")
    rows = [line.split(" ||| ") for line in printed.splitlines()]
    assert [row[0] for row in rows] == ["0", "0", "0", "1", "2", "2", "2"]
    assert len({row[1] for row in rows}) > 2 and ", Sampler" in messages
    words = ["-m", "tekso.tools.trainer", "--mode=export", "--logdir=run", sampler]
    done = processes.run(words, cwd=trained)
    assert done.returncode == 1 and "export supports only beam search" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_process_without_tekso_translates_alike(trained: Path) -> None:
    texts = ["12", "3456", "1", "987", "555555"]
    data = "".join(f"{text}\n" for text in texts).encode()
    printed, _ = translate(trained, "--format=json", data=data)
    records = [json.loads(line) for line in printed.splitlines()]
    assert [record["source"] for record in records] == texts
    # Several examples are computed together in export_mode_test.py and mt/exports_test.py, which
    # convert such functions for LiteRT, too.
    options = ["--export_lengths=8,24", "--export_batch_size=1"]
    exported, _ = run(
        "-m", "tekso.tools.trainer", "--mode=export", "--logdir=run", "--format=json", *options,
        cwd=trained,
    )  # fmt: skip
    assert json.loads(exported)["functions"] == ["translate", "greedy", "score"]
    moved = trained / "moved"
    moved.mkdir()
    (trained / "run" / "export").rename(moved / "export")  # nothing of the run is needed
    # export_mode_test.py loads an export in a process that has never imported Tekso.
    done = processes.run(["-c", LOADER, json.dumps(texts)], cwd=moved, optimized=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    best = [record["hypotheses"][0] for record in records]
    assert loaded["texts"] == [hypothesis["text"] for hypothesis in best]
    # float32 sums, the sources filled up to other lengths.
    assert loaded["scores"] == pytest.approx([h["score"] for h in best], rel=1e-4)


@pytest.mark.slow
def test_a_model_of_several_languages_takes_one_of_them(tmp_path: Path) -> None:
    lines = [f"{7 * n}\t{ONES[n % 10]} {word}\t{word}\n" for n in range(99) for word in "ab"]
    (tmp_path / "train.tsv").write_text("".join(lines))
    settings = [
        "input.corpus=tekso.tasks.mt.pair_files:Tsv",
        "input.corpus.files=train.tsv",
        "input.corpus.language_column=2",
        'input.corpus.languages=["a","b"]',
        *(setting for setting in SETTINGS if "_files=" not in setting),
    ]
    words = [f"--set={setting}" for setting in settings]
    model = ["--model=mt.text_files.Base", "--logdir=run", "--steps=2"]
    run("-m", "tekso.tools.trainer", *model, *words, cwd=tmp_path, op_by_op=True)
    printed, _ = translate(tmp_path, "--language=b", data=b"7\n\n")
    assert len(printed.splitlines()) == 2
    decode_b = ["--mode=decode", "--set=task.decode_language=b", '--set=task.decode=["7"]']
    printed, _ = run(
        "-m", "tekso.tools.trainer", "--logdir=run", *decode_b, cwd=tmp_path, op_by_op=True
    )
    assert "source [b]: 7" in printed
    for options, message in (
        ([], "--language is missing: no target language None; there are a, b"),
        (["--language=bb"], "--language=bb: no target language 'bb'; there are a, b; did you"),
    ):
        command = ["-m", "tekso.tools.decode", "--logdir=run", *options]
        done = processes.run(command, cwd=tmp_path, input="7\n")
        assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "--logdir is missing, as in"),
        (["in.txt"], 2, "'in.txt' is not a flag"),
        (["--logdir=run", "--output=."], 2, "--output=. is a folder"),
        (["--logdir=run", "--input=nowhere"], 1, "nowhere: No such file"),
        (["--logdir=run", "--input=in"], 1, "there is no checkpoint in run/checkpoints"),
        (["--logdir=run", "--beam_size=0"], 2, "beam_size"),
        (["--logdir=run", "--beam=2"], 2, "no flag --beam; did you mean --beam_size?"),
    ],
)
def test_what_is_wrong_is_reported_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").touch()
    assert decode.main(["tekso-decode", *words]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("model", "words", "messages"),
    [
        (
            "lm.text_files.Bytes",
            (),
            (
                "lm.text_files.Bytes is not a translation model",
                f"{typed('tekso-trainer')} --mode=decode --logdir=run",
            ),
        ),
        ("image.digits.Mlp", (), ("--input must be a folder of image files, but is in",)),
        (
            "multi.smart_reply.Docstrings",
            ("--task=trigger", "--beam_size=3"),
            ("--beam_size is for translation, not for multi.smart_reply.Docstrings, which class",),
        ),
    ],
)
def test_a_model_that_translates_nothing_is_refused(
    model: str,
    words: tuple[str, ...],
    messages: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    params = registry.get(model)().tree().to_text()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checkpoint_files.write(
        "run/checkpoints/step_00000001",
        {"weights/w": np.zeros(2, np.float32)},
        Description(step=1, model=model, params=params),
    )
    (tmp_path / "in").touch()
    assert decode.main(["tekso-decode", "--logdir=run", "--input=in", *words]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error


@pytest.mark.slow
def test_what_the_run_cannot_do_is_reported(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    for words, code, message in (
        (["--checkpoint=7"], 1, "there is no checkpoint"),
        (["--set=task.x=1"], 2, "--set task.x=1"),
        (["--beam_size=2", "--num_hypotheses=3"], 1, "num_hypotheses is 3, must be 1"),
    ):
        words = ["--logdir=run", "--input=in.txt", "--output=never", *words]
        assert decode.main(["tekso-decode", *words]) == code
        assert message in capsys.readouterr().err
        assert not (trained / "never").exists()
