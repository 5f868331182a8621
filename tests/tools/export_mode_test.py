"""Tests that a model exported by --mode=export gives the outputs of the run, without Tekso."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

from tekso.framework.exports import ExportedOutput
from tekso.tools import export_mode, trainer

TEXT = "to be or not to be, that is the question\n" * 60
PROMPTS = ["to be", "t", "the question is"]
SETTINGS = [
    "task.model.dim=16",
    "task.model.stack.num_layers=1",
    "task.model.stack.layer.attention.num_heads=2",
    "task.model.stack.layer.feed_forward.hidden_dim=24",
    "task.decode.num_samples=1",
    "task.decode.max_new_tokens=30",  # more than the window: it slides
    f"task.decode.prompts={json.dumps(PROMPTS)}",
    "input.length=20",
    "input.files=a.txt",
    "learner.ema_decay=0.5",
    "run.decode_at_end=false",
    "execution.towers=1",
    "execution.xla=none",  # to compile would take longer than all the rest
]

# Knows nothing of Tekso: encodes and decodes by the JSON beside the model.
LOADER = """
import json, sys
sys.modules["tekso"] = None  # an import of it is an error
import numpy as np
import tensorflow as tf

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
model = tf.saved_model.load(folder)
about = json.load(open(folder + "/assets/export.json"))
vocabulary = about["vocabularies"]["tokenizer"]
table = [bytes.fromhex(part).decode() for part in vocabulary["bytes_of_ids"]]
encoded = [[table.index(char) for char in prompt] for prompt in prompts]
ids = np.zeros([len(encoded), max(map(len, encoded))], np.int32)
for row, one in zip(ids, encoded):
    row[: len(one)] = one
lengths = np.array([len(one) for one in encoded], np.int32)
inputs = {"ids": tf.constant(ids), "lengths": tf.constant(lengths)}

def texts(found):
    rows = zip(found["ids"].numpy(), found["lengths"].numpy())
    return ["".join(table[i] for i in row[:n]) for row, n in rows]

def drawn(seed):
    return texts(model.signatures["sample"](**inputs, seed=tf.constant(seed, tf.int64)))

whole = tf.constant([[vocabulary["end_id"], *encoded[2]]])
score = model.signatures["score"](ids=whole[:, :-1], labels=whole[:, 1:])["log_probs"]
print(json.dumps({
    "tekso": [name for name in sys.modules if name.startswith("tekso.")],
    "greedy": texts(model.signatures["generate"](**inputs)),
    "ids": model.signatures["generate"](**inputs)["ids"].numpy().tolist(),
    "sampled": drawn(0),
    "others": drawn(1),
    "score": float(tf.reduce_sum(score)),
    "encoded": encoded,
    "step": about["step"],
}))
"""


def run(*words: str, cwd: Path) -> str:
    exports = "--mode=export" in words
    done = processes.run([*words], cwd=cwd, timeout=600, optimized=False, op_by_op=not exports)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, *words: str) -> str:
    return run("-m", "tekso.tools.trainer", "--logdir=run", *words, cwd=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained for a few steps."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "a.txt").write_text(TEXT)
    train(folder, "--model=lm.text_files.Char", "--steps=8", *(f"--set={s}" for s in SETTINGS))
    (folder / "a.txt").unlink()  # prompts are continued, and models exported, without the data
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path) -> dict[str, Any]:
    """What --mode=export prints about it."""
    printed = train(
        trained, "--mode=export", "--output=out", "--litert=float32,int8", "--format=json",
        "--export_batch_size=2", "--export_lengths=20",  # decode_test.py exports several lengths
    )  # fmt: skip
    record: dict[str, Any] = json.loads(printed)
    return record


@pytest.fixture(scope="module")
def loaded(trained: Path, exported: dict[str, Any]) -> dict[str, Any]:
    """What a process without Tekso gets."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOADER, "out", json.dumps(PROMPTS)],
        cwd=trained, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gradient" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def decode(trained: Path, *settings: str) -> list[dict[str, Any]]:
    words = [f"--set={setting}" for setting in settings]
    printed = train(trained, "--mode=decode", "--format=json", *words)
    records: list[dict[str, Any]] = json.loads(printed)["records"]
    return records


@pytest.mark.slow
def test_a_process_without_tekso_generates_what_the_run_does(
    trained: Path, loaded: dict[str, Any]
) -> None:
    assert loaded["tekso"] == [] and loaded["step"] == 8
    greedy = decode(trained, "task.decode.temperature=0")
    assert loaded["greedy"] == [record["text"] for record in greedy]
    assert len(set(loaded["greedy"])) == 3


@pytest.mark.slow
def test_it_samples_and_scores_what_the_run_does(trained: Path, loaded: dict[str, Any]) -> None:
    (trained / "scored.txt").write_text(PROMPTS[2])
    *samples, score = decode(trained, "task.decode.score_files=scored.txt")
    assert loaded["sampled"] == [record["text"] for record in samples]
    assert loaded["others"] != loaded["sampled"]
    # Sums of 15 float32 log-probabilities, the window filled up to another length.
    assert loaded["score"] == pytest.approx(score["log_prob"], rel=1e-5)


@pytest.mark.slow
def test_litert_generates_the_same_ids(
    trained: Path, exported: dict[str, Any], loaded: dict[str, Any]
) -> None:
    assert exported["not_litert"] == ["score", "sample"]
    assert [Path(name).name for name in exported["litert"]] == [
        "generate_float32.tflite",
        "generate_int8.tflite",
    ]
    agreement = {}
    for kind in ("float32", "int8"):
        runner = litert_runner((trained / "out" / f"generate_{kind}.tflite").read_bytes())
        same = []
        for prompt, wanted in zip(loaded["encoded"], loaded["ids"], strict=True):
            ids = np.zeros([1, 20], np.int32)
            ids[0, : len(prompt)] = prompt
            found = runner(ids=ids, lengths=np.array([len(prompt)], np.int32))
            new = slice(len(prompt), len(prompt) + 30)  # the prompt is the same in any case
            assert len(wanted[new]) == 30
            same.append(np.mean(found["ids"][0, new] == np.array(wanted[new])))
        agreement[kind] = float(np.mean(same))
    assert agreement["float32"] == 1.0
    assert agreement["int8"] >= 0.5, agreement  # weights rounded to 8 bits: texts part somewhere


def litert_runner(data: bytes) -> Any:
    try:
        from ai_edge_litert import interpreter as litert_runtime
    except ModuleNotFoundError:  # the one that TensorFlow still has
        import tensorflow as tf

        return tf.lite.Interpreter(model_content=data).get_signature_runner()
    return litert_runtime.Interpreter(model_content=data).get_signature_runner()


def test_it_is_printed_which_outputs_are_as_long_as_the_rows() -> None:
    outputs = {
        "digit": ExportedOutput("of the row"),
        "norms": ExportedOutput("of each token", length_of="x"),
        "sums": ExportedOutput("of each token", length_of="x"),
    }
    assert export_mode._lengths_of_outputs(outputs) == (
        "as long as the rows of x: norms, sums; of a shape that does not depend on the rows: digit"
    )
    assert "shape" not in export_mode._lengths_of_outputs({"norms": outputs["norms"]})


@pytest.mark.slow
def test_what_cannot_be_exported_is_reported_in_a_line(
    trained: Path,
    exported: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(trained)
    for words, code, message in (
        (["--output=out"], 2, "out exists: give another --output"),
        (["--output=new", "--export_lengths=4,30"], 1, "expected ascending lengths from 1 to 20"),
        (["--output=new", "--export_lengths=4,long"], 2, "'long' is not a length"),
        (["--output=new", "--litert=int4"], 2, "'int4' is unknown; expected float32 or int8"),
        (["--output=new", "--checkpoint=3"], 1, "there is no checkpoint"),
    ):
        assert trainer.main(["tekso-trainer", "--mode=export", "--logdir=run", *words]) == code
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, error
        assert not (trained / "new").exists()
    words = ["--mode=eval", "--logdir=run", "--litert=int8"]
    assert trainer.main(["tekso-trainer", *words]) == 2
    assert "--litert works only with --mode=export, not with eval" in capsys.readouterr().err


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
from tekso.tools import trainer
sys.exit(trainer.main(["tekso-trainer", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_an_export_without_room_leaves_nothing_and_says_why(trained: Path) -> None:
    flags = ["--logdir=run", "--mode=export", "--output=full", "--export_lengths=20"]
    flags.append("--export_batch_size=1")
    done = processes.run(["-c", LIMITED, *flags], cwd=trained, timeout=600)
    assert done.returncode == 5 and done.stderr == (
        "tekso-trainer: cannot write full: the file exceeds the size limit of 20,000 bytes "
        "(ulimit -f). Incomplete files were removed; increase the limit and repeat the command\n"
    )
    assert not list(trained.glob("full*"))
