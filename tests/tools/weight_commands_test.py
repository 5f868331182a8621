"""tekso-ckpt convert and merge: runs that they write are restored like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import processes
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

from tekso.framework import registry
from tekso.framework.context import StepContext
from tekso.framework.run import initial_weights, weight_files
from tekso.framework.run.checkpoints import CheckpointError
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.new_run import NewRun
from tekso.framework.run.opened import open_run
from tekso.framework.run.weights import load_task, load_weights
from tekso.framework.warm_start import WarmStart
from tekso.models.layers.lora import Lora
from tekso.tools import ckpt

IDS = np.random.default_rng(3).integers(0, 11, (2, 5)).astype(np.int32)
SIZES = {
    "task.model.vocab_size": 11,
    "task.model.dim": 12,
    "task.model.stack.num_layers": 2,
    "task.model.stack.layer.attention.num_heads": 3,
    "task.model.stack.layer.feed_forward.hidden_dim": 48,
    "task.model.positions.max_length": 7,
    "task.decode": None,
    "input.length": 7,
}
SET = [f"--set={path}={value}" for path, value in SIZES.items()]
LORA = Lora.Params(rank=2, alpha=6.0)
FROZEN = ["(?!.*_lora_[ab]$).*"]


def save(logdir: str, settings: dict[str, Any], dtype: str = "float32") -> dict[str, np.ndarray]:
    """Writes a run of lm.gpt.Gpt2 in small with random weights, which it returns."""
    registered = registry.get("lm.gpt.Gpt2")().tree()
    tree = registered.copy().set(SIZES)
    tree.set({"*.dtype": dtype}).set(settings)
    task = tree.task.copy().instantiate()
    rng = np.random.default_rng(1)
    weights = {}
    for path, spec in task.specs().items():
        value = rng.normal(0, 0.5, spec.shape).astype(np.float32)
        weights[path] = value.astype(tf.as_dtype(spec.dtype).as_numpy_dtype)
    new = NewRun("lm.gpt.Gpt2", tree, registered, task, weights)
    new.write(logdir, command=["save", logdir])
    return weights


def logits(logdir: str) -> np.ndarray:
    task = load_task(logdir)
    theta = load_weights(task, logdir)
    return task.model.logits(theta.model, tf.constant(IDS), StepContext()).numpy()


def run(*words: str) -> int:
    return ckpt.main(["tekso-ckpt", *words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_every_bit_is_kept(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    weights = save("run", {}, dtype)
    assert run("convert", "run/last", "a.safetensors") == 0, capsys.readouterr().err
    assert "wrote 36 tensors of run/checkpoints/step_00000000" in capsys.readouterr().out
    file = weight_files.open_weights("a.safetensors")
    assert (
        file.read("weights/model/embedding/table").dtype == weights["model/embedding/table"].dtype
    )
    about = file.description.tensors["weights/model/stack/layers/1/attention/q"]
    assert about["dims"] == ["embed", "heads", "head_dim"]
    assert run("convert", "a.safetensors", "new", "--format=json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "lm.gpt.Gpt2"
    new = open_run("new")
    for path, value in weights.items():
        assert new.checkpoint.read(f"weights/{path}").tobytes() == value.tobytes()
    assert new.tree().to_text() == open_run("run").completed_tree().to_text()
    slots = [key for key in new.checkpoint.keys if key.startswith("learner/model/positions/w/")]
    assert len(slots) == 2
    assert not any(new.checkpoint.read(key).any() for key in slots)


def test_merged_matrices_give_the_logits_of_the_adapted_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapters = {"*.adapter": LORA, "*.table_adapter": LORA}
    save("run", {**adapters, "learner.frozen": FROZEN, "learner.ema_decay": 0.5})
    Path("run/assets").mkdir()
    Path("run/assets/words.txt").write_text("to be")
    words = ["merge", "--logdir=run", "--output=merged", "--import=json"]
    assert run(*words) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert "merged the adapters of 13 matrices of run/checkpoints" in text
    assert text.endswith(" --import=json --mode=eval --logdir=merged\n")
    np.testing.assert_allclose(logits("merged"), logits("run"), rtol=1e-4, atol=1e-4)
    merged = open_run("merged")
    assert not [key for key in merged.checkpoint.keys if "_lora_" in key]
    assert "learner/model/embedding/table/ema" in merged.checkpoint.keys
    tree = merged.tree()
    assert tree.learner.frozen == [] and tree.task.model.stack.layer.attention.adapter is None
    assert Path("merged/assets/words.txt").read_text() == "to be"
    assert Logdir("merged").model() == "lm.gpt.Gpt2"
    assert run("merge", "--logdir=merged", "--output=again") == 1
    assert "has no adapters: there is nothing to merge" in capsys.readouterr().err


def test_a_run_becomes_another_run_with_other_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = save("run", {"learner.ema_decay": 0.5})
    Path("run/assets").mkdir()
    Path("run/assets/words.txt").write_text("to be")
    words = ["convert", "run/checkpoints/0", "new", "--set=*.dtype=bfloat16", "--import=json"]
    assert run(*words) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert "wrote a run from 36 tensors of run/checkpoints/step_0" in text
    assert text.endswith(" --import=json --mode=eval --logdir=new\n")
    new = open_run("new/0")
    for path, value in weights.items():
        found = new.checkpoint.read(f"weights/{path}")
        assert found.tobytes() == value.astype(ml_dtypes.bfloat16).tobytes()
    assert Path("new/assets/words.txt").read_text() == "to be"
    assert np.abs(logits("new") - logits("run")).max() < 0.2  # of values up to 10


def test_adapters_are_exported_alone_and_few_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    weights = save("run", {"*.attention.adapter": LORA, "learner.frozen": FROZEN})
    words = ["convert", "run", "a.safetensors", "--match=*_lora_?"]
    assert run(*words) == 0, capsys.readouterr().err
    file = weight_files.open_weights("a.safetensors")
    assert {key.removeprefix("weights/") for key in file.keys} == {
        path for path in weights if "_lora_" in path
    }
    assert run("convert", "a.safetensors", "new") == 1
    assert "the weights do not fit lm.gpt.Gpt2: missing model/" in capsys.readouterr().err


def warm_started(settings: dict[str, Any], **fields: Any) -> str:
    """Plans a warm start of a model with adapters; returns the error or the warnings."""
    tree = registry.get("lm.gpt.Gpt2")().tree().set(SIZES).set(settings)
    source = WarmStart.Params().set(fields)
    warnings: list[str] = []
    try:
        initial_weights.plan(
            tree.task.instantiate().specs(), {"main": source}, assets="none", warn=warnings.append
        )
    except ValueError as error:
        return str(error)
    return "\n".join(warnings)


@pytest.mark.parametrize("source", ["a.safetensors", "run"])
@pytest.mark.parametrize("earlier", [False, True])
def test_adapters_of_another_scale_or_of_other_matrices_are_refused(
    source: str, earlier: bool
) -> None:
    adapters = {"*.attention.adapter": LORA}
    save("run", {**adapters, "learner.frozen": FROZEN})
    if earlier:  # a checkpoint of a version that did not describe the scale
        path = Path("run/checkpoints/step_00000000/checkpoint.json")
        described = json.loads(path.read_text())
        for tensor in described["tensors"].values():
            tensor.pop("scale", None)
        path.write_text(json.dumps(described))
    assert run("convert", "run", "a.safetensors", "--match=*_lora_?") == 0
    fields: dict[str, Any] = {"checkpoint": source}
    if source == "a.safetensors":
        fields["ignore"] = FROZEN
    assert not warm_started(adapters, **fields)
    assert not warm_started({"*.attention.adapter": LORA.copy().set(alpha=6)}, **fields)
    said = warm_started({"*.attention.adapter": Lora.Params(rank=2, alpha=8.0)}, **fields)
    assert f"_lora_b is multiplied by 3 (alpha / rank of an adapter) in {source}" in said
    assert "_lora_b by 4: give the new model the same `alpha` and `rank`" in said
    fewer = LORA.copy().set(only=["q", "v"])
    said = warm_started({"*.attention.adapter": fewer}, **fields)
    assert "the new model has no model/stack/layers/0/attention/k_lora_b and 3 more" in said
    assert "or leave them out with run.warm_start.main.only" in said
    only = [*FROZEN, r".*/[qv]_lora_[ab]"]
    assert not warm_started({"*.attention.adapter": fewer}, **fields, only=only)
    assert not warm_started({}, checkpoint="run", only=FROZEN)
    assert "and 7 more adapters" in warm_started({}, checkpoint="run")


def test_other_ways_to_read_adapters_compare_their_scale_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save("run", {"*.attention.adapter": LORA, "learner.frozen": FROZEN})
    assert run("convert", "run", "a.safetensors") == 0
    for source in ("a.safetensors", "run"):
        assert run("convert", source, "new", "--set=*.adapter.alpha=8") == 1
        assert "q_lora_b is multiplied by 3 (alpha" in capsys.readouterr().err
    task = open_run("run").tree().task.set({"*.adapter.alpha": 8.0}).instantiate()
    with pytest.raises(CheckpointError, match=r"multiplied by 3 .* by 4: give the new model"):
        load_weights(task, "run")
    file = weight_files.open_weights("a.safetensors")
    save_file({key[8:]: file.read(key) for key in file.keys}, "others.safetensors")
    said = warm_started({"*.attention.adapter": LORA}, checkpoint="others.safetensors")
    assert "others.safetensors does not describe the alpha / rank" in said and "must be 3" in said


def gpt2_file(path: str, layers: int = 2, vocab: int = 11) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocab, 12), "wpe.weight": (7, 12)}
    for i in range(layers):
        sizes = {"attn.c_attn": (12, 36), "attn.c_proj": (12, 12)}
        for name, shape in {**sizes, "mlp.c_fc": (12, 48), "mlp.c_proj": (48, 12)}.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (12,), f"h.{i}.{norm}.bias": (12,)}
    shapes |= {"ln_f.weight": (12,), "ln_f.bias": (12,)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path, {"format": "pt"})
    return tensors


def test_gpt2_comes_in_and_goes_out(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = gpt2_file("theirs.safetensors")
    words = ["convert", "theirs.safetensors", "run", "--layout=gpt2", "--model=lm.gpt.Gpt2", *SET]
    assert run(*words) == 0, capsys.readouterr().err
    assert "wrote a run from 28 tensors of theirs.safetensors" in capsys.readouterr().out
    assert logits("run").shape == (2, 5, 11)
    words = ["convert", "run", "ours.safetensors", "--layout=gpt2"]
    assert run(*words) == 0, capsys.readouterr().err
    ours = weight_files.open_weights("ours.safetensors")
    assert ours.metadata["format"] == "pt"
    assert ours.keys == {f"weights/{name}" for name in tensors}
    for name, value in tensors.items():
        np.testing.assert_array_equal(ours.read(f"weights/{name}"), value)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["export", "--logdir=run", "--output=x"], 2,
         "tekso-ckpt convert RUN FILE.safetensors"),
        (["convert", "run"], 2, "convert takes SOURCE DEST, but 1 paths are given"),
        (["convert", "run", "x", "--output=y"], 2, "--output works only with average and merge"),
        (["convert", "run", "x.safetensors", "--match=w/*"], 2,
         "--match=weights/w/*: no weight matches"),
        (["convert", "run", "x.safetensors", "--set=a=1"], 2,
         "--set works only with a conversion to a run"),
        (["convert", "run", "x", "--layout=gpt2"], 2,
         "--layout works only with a conversion between a file and a run"),
        (["convert", "run", "x", "--model=lm.gpt.Gpt2"], 2,
         "--model works only with a conversion from a file to a run"),
        (["convert", "run", "x.safetensors", "--layout=gpt2", "--match=*/q"], 2,
         "--match=weights/*/q leaves out embedding/table: --layout needs all weights"),
        (["convert", "theirs.safetensors", "x.safetensors"], 2,
         "theirs.safetensors and x.safetensors are both safetensors: one of them must be a run"),
        (["list", "--logdir=run", "--format=safetensors"], 2, "should be one of <text|json>"),
        (["convert", "no.safetensors", "x"], 1, "there is no file no.safetensors"),
        (["convert", "no", "x"], 1, "there is no checkpoint in no/checkpoints"),
        (["convert", "run/7", "x"], 1,
         "no checkpoint run/checkpoints/step_00000007; checkpoints in run/checkpoints: step_0"),
        (["convert", "bad.safetensors", "x"], 1, "bad.safetensors is truncated"),
        (["convert", "theirs.safetensors", "x"], 2, "give --model=KEY"),
        (["convert", "theirs.safetensors", "x", "--model=lm.gpt.Gpt3"], 2,
         "did you mean lm.gpt.Gpt2"),
        (["convert", "theirs.safetensors", "x", "--model=lm.gpt.Gpt2"], 1,
         "missing model/embedding/table"),
        (["convert", "theirs.safetensors", "x", "--model=lm.gpt.Gpt2", "--layout=gpt2",
          "--set=run.stepz=2"], 2, "did you mean run.steps"),
        (["convert", "theirs.safetensors", "x", "--model=lm.gpt.Gpt2", "--layout=gpt2"], 1,
         "missing h.2.ln_1.weight; "),
        (["convert", "theirs.safetensors", "x", "--model=lm.text_files.Bytes",
          "--layout=gpt2"], 1, "the model is not GPT-2: softmax is set, but GPT-2 ties it"),
        (["convert", "theirs.safetensors", "run"], 2, "run exists: give another name"),
        (["merge", "--logdir=run", "--output=x"], 1, "has no adapters"),
        (["merge", "--logdir=run", "--output=x", "--model=lm.gpt.Gpt2"], 2,
         "--model works only with convert, not with merge"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_in_a_line(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    save("run", {})
    gpt2_file("theirs.safetensors")
    Path("bad.safetensors").write_bytes(b"half")
    assert run(*words) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert error.count("\n") == 1, error
    assert not Path("x").exists() and not Path("x.safetensors").exists()


def test_weights_that_are_not_finite_are_refused() -> None:
    bad = {"w": np.array([1, np.nan], ml_dtypes.bfloat16)}
    save_file({"w": bad["w"]}, "bad.safetensors")
    read = weight_files.open_weights("bad.safetensors").read("weights/w")
    assert read.tobytes() == bad["w"].tobytes()
    gpt2_file("theirs.safetensors")
    tensors = {**gpt2_file("theirs.safetensors"), "ln_f.bias": np.full(12, np.inf, np.float32)}
    save_file(tensors, "theirs.safetensors")
    words = ["convert", "theirs.safetensors", "run", "--layout=gpt2", "--model=lm.gpt.Gpt2", *SET]
    assert run(*words) == 1
    assert not Path("run/params.txt").exists()


@pytest.mark.slow
def test_an_imported_gpt2_is_evaluated(tmp_path: Path) -> None:
    gpt2_file("theirs.safetensors", vocab=257)
    words = ["convert", "theirs.safetensors", "run", "--layout=gpt2", "--model=lm.gpt.Gpt2"]
    assert run(*words, *SET, "--set=task.model.vocab_size=257") == 0
    Path("merges.txt").write_text("#version: 0.2\n")
    Path("a.txt").write_text("to be or not to be, that is the question\n" * 99)
    command = ["-m", "tekso.tools.trainer", "--mode=eval", "--logdir=run", "--format=json"]
    command += ["--set=input.tokenizer.file=merges.txt", "--set=input.files=a.txt"]
    done = processes.run([*command, "--set=input.batch_size=2"], cwd=tmp_path, op_by_op=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 0
    assert 2 < found["dev"]["loss"] < 20  # random logits, in nats
