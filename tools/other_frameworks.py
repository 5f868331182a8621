"""Options of other frameworks and their trainers, and what Tekso has for them."""

from __future__ import annotations

_LOGDIR = "--logdir names the folder of a run, with its checkpoints"
_STEPS = "the number of training steps is set by --steps"
_EPOCHS = (
    "training is measured in steps: set --steps to epochs × training examples / input.batch_size"
)
_DEVICES = (
    "training uses all accelerators of the machine; --cpu_devices=2 creates logical devices on a "
    "CPU, and --execution chooses how they are used"
)
_DTYPE = "the type of activations is set by --set run.activation_dtype=bfloat16"
_RESUME = "to resume a run, repeat its command with the same --logdir"
_CONFIG = "an experiment is a class that --model names, and --set changes its settings"
_ACCUMULATION = "gradients are accumulated by --set learner.accumulation_steps=4"
_CLIPPING = "gradients are clipped by --set learner.clip_global_norm=1.0"
_PATIENCE = "early stopping is set by --set run.early_stopping.patience=3"

_HINTS = {
    _EPOCHS: ("epoch", "epochs", "max_epochs", "num_epochs", "num_train_epochs"),
    _STEPS: ("iterations", "max_iters", "max_steps", "num_steps", "total_steps", "train_steps"),
    _LOGDIR: ("checkpoint_dir", "ckpt_dir", "log_dir", "model_dir", "output_dir", "save_dir"),
    _DEVICES: ("gpu", "gpus", "n_gpus", "nproc_per_node", "num_gpus"),
    _DTYPE: ("amp", "bf16", "dtype", "fp16", "mixed_precision", "precision"),
    _RESUME: ("resume", "resume_from", "resume_from_checkpoint"),
    _CONFIG: ("cfg", "config", "config_file"),
    _ACCUMULATION: ("accumulate_grad_batches", "grad_accum", "gradient_accumulation_steps"),
    _CLIPPING: ("clipnorm", "global_clipnorm", "grad_clip", "gradient_clip_val", "max_grad_norm"),
    _PATIENCE: ("early_stopping", "patience"),
}
_BY_NAME = {name: text for text, names in _HINTS.items() for name in names}

_EXECUTIONS = {
    "replicas of the model on all devices are --execution=data_parallel, the default": (
        "ddp", "dp", "distributed_data_parallel", "horovod", "mirrored", "multi_worker_mirrored",
    ),
    "sharded weights are --execution=mesh_sharded --set execution.rules=fsdp": (
        "deepspeed", "fsdp", "fully_sharded", "zero",
    ),
    "layers divided over devices are --execution=mesh_sharded with rules, as "
    "--set execution.mesh='data:2;model:2' --set execution.rules='batch:data;mlp:model'": (
        "dtensor", "gspmd", "megatron", "model_parallel", "tensor_parallel", "tp",
    ),
    "stages of a model are --execution=pipelined --set execution.num_stages=2": (
        "gpipe", "pipe", "pipeline", "pipeline_parallel", "pp",
    ),
}  # fmt: skip
_EXECUTION_BY_NAME = {name: text for text, names in _EXECUTIONS.items() for name in names}


def hint(name: str) -> str:
    """Returns what Tekso has for an option of another framework, or "" if it is not known.

    Args:
      name: the option without dashes in front, such as "max_epochs" or "max-epochs".
    """
    return _BY_NAME.get(name.lower().replace("-", "_"), "")


def execution_hint(name: str) -> str:
    """Returns what Tekso has for an execution of another framework, or "" if it is not known.

    Args:
      name: the execution, such as "ddp" or "tensor-parallel".
    """
    return _EXECUTION_BY_NAME.get(name.lower().replace("-", "_"), "")
