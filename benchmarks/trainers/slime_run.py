"""slime's train.py with Ray on the CPU, from its own option for recorded rollouts to its last step.

    python -m benchmarks.trainers.slime_run FOLDER [FORM...] [MODE...]

FOLDER holds `slime`, a checkout, and `Megatron-LM`, the commit that slime's docker/Dockerfile names
with docker/patch/latest/megatron.patch. Runs it in mode "off", and in mode "auto" or those that are
given; prints what it says of each update: two of two groups each, on two workers. A form is one of
`FORMS`, in the place of data parallelism. What stands in for a GPU is `STAND_INS`. What such a run
does after that is

    python -m benchmarks.trainers.slime_run FOLDER/slime/train.py OPTIONS

with slime's own options.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainers import on_ray, recorded
from benchmarks.trainers.on_ray import StandIn
from tests.core.trainers import stand_ins

HOOK = "benchmarks.trainers.slime_run.on_cpu"
UNUSED = ("sglang", "sglang_router", "torch_memory_saver", "wandb", "pylatexenc", "aiohttp")
STAND_INS = (
    StandIn("SGLang's engines", "`--load-debug-rollout-data`, slime's own option: rollouts of the"
            " bundled file, with the log-probs that transformers gives", "they need a GPU"),
    StandIn("packages that it imports: " + ", ".join(UNUSED), "empty modules",
            "engines, memory of a GPU and web services are not used in such a run"),
    StandIn("the accelerator", "one for the CPU, by slime's `register_accelerator`",
            "it knows CUDA and MUSA"),
    StandIn("`torch.cuda`, NCCL", "`megatron_prefix/lab/platforms/cpu.py`, gloo",
            "there is no GPU"),
    StandIn("transformer-engine", "Megatron's local layers, with `LocalAttention`",
            "its kernels need a GPU; Megatron's own attention takes no packs"),
    StandIn("the loader of Qwen3's weights", "the same, given transformer-engine's name of the norm"
            " before attention", "it does not know the name in local layers"),
    StandIn("Triton, `torch.compile`", "functions as written", "they need a GPU, or a compiler"),
    StandIn("two GPUs", "`ray.init(num_gpus=2)`", "Ray only counts them"),
)  # fmt: skip
"""All of it."""

OPTIONS = f"""
    --swiglu --num-layers {recorded.LAYERS} --hidden-size {recorded.HIDDEN}
    --ffn-hidden-size {recorded.FEED} --num-attention-heads {recorded.HEADS}
    --group-query-attention --num-query-groups {recorded.QUERY_GROUPS}
    --kv-channels {recorded.HIDDEN // recorded.HEADS} --vocab-size {recorded.VOCAB}
    --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
    --norm-epsilon 1e-6 --rotary-base 1000000 --qk-layernorm --untie-embeddings-and-output-weights
    --num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt {recorded.SIZE}
    --global-batch-size {2 * recorded.SIZE} --micro-batch-size {recorded.SIZE}
    --advantage-estimator grpo --eps-clip 0.2
    --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
    --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0.1
    --attention-dropout 0 --hidden-dropout 0
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --actor-num-nodes 1 --actor-num-gpus-per-node {on_ray.WORKERS}
    --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --custom-megatron-init-path megatron_prefix.auto.init"""
"""Groups stay on one rank, as the page says; what a GPU's kernels fuse is left out."""
FORMS = {
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}
"""Ranks of the actor and of the reference. slime's groups of ranks do not know what torch 2.13
calls for sequence parallelism, and its critic wants memory of a GPU to be given back."""


def on_cpu() -> None:
    """Prepares a process, before slime is imported there."""
    stand_ins.for_megatron()
    from megatron_prefix.lab.platforms import cpu

    cpu.enable()
    from tests.core.trainers.cpu_training import run_on_cpu

    run_on_cpu()
    torch.compiler.set_stance("force_eager")
    stand_ins.StandIns(*UNUSED)
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    _register_cpu()
    _name_norms()


def _register_cpu() -> None:
    """The CPU as an accelerator of slime's."""
    from slime.utils import accelerator
    from slime.utils.accelerator.base import Accelerator

    def nothing(*_: Any, **__: Any) -> None:
        """There is nothing to wait for, or to give back."""

    def zero(*_: Any, **__: Any) -> int:
        """Bytes."""
        return 0

    members = {
        "name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo",
        "is_available": lambda self: True, "device_count": lambda self: 1,
        "device": lambda self, index=None: torch.device("cpu"),
        "device_name": lambda self, index=None: "cpu", "current_device": lambda self: "cpu",
        "set_device": nothing, "synchronize": nothing, "current_stream": nothing,
        "empty_cache": nothing, "memory_allocated": zero, "memory_reserved": zero,
        "mem_get_info": lambda self, device=None: (0, 0),
    }  # fmt: skip
    accelerator.register_accelerator("cpu", type("CPU", (Accelerator,), members))


def _name_norms() -> None:
    """Lets slime load Hugging Face's weights into Megatron's local layers."""
    from slime.backends.megatron_utils import hf_to_megatron

    load = hf_to_megatron._LOADERS["qwen3"]
    ours, its = ".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"
    hf_to_megatron._LOADERS["qwen3"] = lambda name, *rest: load(name.replace(ours, its), *rest)


def write_rollouts(path: Path, model: Path) -> None:
    """A file as `--save-debug-rollout-data` leaves it."""
    samples: list[dict[str, Any]] = []
    for number, group in enumerate(recorded.groups(4)):
        said = recorded.log_probs(model, group.rollouts)
        for one, log_probs in zip(group.rollouts, said, strict=True):
            mask = one.loss_mask[one.prompt_len :]
            sample = {
                "group_index": number, "index": len(samples), "tokens": one.tokens.tolist(),
                "response_length": len(mask), "loss_mask": mask.astype(int).tolist(),
                "reward": float(one.reward), "rollout_log_probs": log_probs,
                "status": "completed",
            }  # fmt: skip
            samples.append(sample)
    torch.save({"rollout_id": 0, "samples": samples}, path)


def figures(said: str) -> list[dict[str, float]]:
    """The numbers of slime's lines "step 0: {...}"."""
    found = re.findall(r"\bstep \d+: (\{.*?\})", said)
    return [
        {name.removeprefix("train/"): float(value) for name, value in ast.literal_eval(one).items()
         if "lr-pg" not in name and name not in ("train/step", "train/global_batch_size")}
        for one in found
    ]  # fmt: skip


def main() -> int:
    """Runs both modes, or train.py."""
    given = Path(sys.argv[1]).resolve()
    if given.is_file():
        sys.argv = sys.argv[1:]
        on_cpu()
        on_ray.run_script(given, HOOK)
        return 0
    from megatron_prefix.lab.numerics import tolerance
    from tests.core.trainers.registry import installed

    forms = [word for word in sys.argv[2:] if word in FORMS]
    modes = [word for word in sys.argv[2:] if word not in FORMS] or ["auto"]
    folders = [installed("slime"), given / "slime", given / "Megatron-LM"]
    runs = {}
    with tempfile.TemporaryDirectory() as name:
        model, rollouts, more = (Path(name) / one for one in ("model", "0.pt", "more.yaml"))
        recorded.write_model(model)
        write_rollouts(rollouts, model)
        more.write_text("bf16: false\n", encoding="utf-8")  # no option says so
        places = [
            "--hf-checkpoint", model, "--load", model, "--ref-load", model,
            "--load-debug-rollout-data", rollouts, "--custom-config-path", more,
        ]  # fmt: skip
        script = ["-m", "benchmarks.trainers.slime_run", given / "slime" / "train.py"]
        options = [one for text in (OPTIONS, *map(FORMS.get, forms)) for one in str(text).split()]
        command = [*map(str, script), *options, *map(str, places)]
        for mode in ("off", *modes):
            environ = {"MEGATRON_PREFIX_MODE": mode, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            said = on_ray.launched(command, folders, environ)
            print(*dict.fromkeys(on_ray.TOLD.findall(said)), sep="\n", flush=True)
            runs[mode] = figures(said)
    return on_ray.compared(runs, tolerance(torch.float32, 4096))


if __name__ == "__main__":
    sys.exit(main())
