"""Megatron-LM's pretrain through `megatron_prefix.run`: a line of JSON a run.

    PYTHONPATH=FOLDER python -m tests.core.trainers.pretrain_steps SCRIPT RUN...

SCRIPT is a checkout's pretrain_gpt.py, or pretrain_script.py beside this file. A run is a layout
(see worker.py), a mode, and steps if not 20: "tp2-pp2-dp2-packed on 5". In "packed" ones
documents are packed into rows (THD), as `--dataloader-inter-document-masking` of 0.19 has it. Mode
"stock" runs the script without this package. The data are documents that begin alike, as rollouts
of two prompts do. Forked ranks save the imports; by torchrun the same command is in on_cpu.py.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.lab.cli import script as command  # noqa: E402
from tests.core.trainers import worker  # noqa: E402
from tests.core.trainers.cpu_training import ARGUMENTS, LENGTH, VOCAB, run_on_cpu  # noqa: E402

ON_CPU = str(Path(__file__).with_name("on_cpu.py"))
FLAGS = (
    "--prefix-min-gain 0 --prefix-segment-tokens 128 --prefix-chunk-tokens 32 --prefix-kernel math"
)


def write_documents(path, length):
    """Megatron's .bin and .idx of 64 documents; three quarters of each are one of two prompts."""
    from megatron.core.datasets import indexed_dataset

    draw = np.random.default_rng(0)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    prompts = draw.integers(1, VOCAB, (2, length * 3 // 4))
    for number in range(64):
        answer = draw.integers(1, VOCAB, length - length * 3 // 4)
        tokens = np.concatenate([prompts[number % 2], answer])
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{path}.idx")


def arguments(layout, steps, folder):
    """Megatron-LM's command line."""
    sizes, packed = worker.layout_of(layout), "packed" in layout
    common = ARGUMENTS.replace("--mock-data", "").replace("--train-iters 2", "")
    found = [
        *common.split(), "--train-iters", steps,
        "--data-path", str(folder / ("half" if packed else "whole")),
        "--split", "100,0,0", "--data-cache-path", str(folder / "cache"),
        "--tensor-model-parallel-size", str(sizes.tp),
        "--pipeline-model-parallel-size", str(sizes.pp),
        "--micro-batch-size", "1" if packed else "2",
    ]  # fmt: skip
    ahead = ["--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "1.0"] * ("mtp" in layout)
    return [*found, *["--dataloader-inter-document-masking"] * packed, *ahead]


def run(script, layout, mode, steps, folder):
    """What the steps of one rank were."""
    runtime.initialize(worker.layout_of(layout))
    rank = torch.distributed.get_rank()
    kept = folder / f"{layout}-{mode}"
    os.environ.update(STEPS=str(kept), RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    line = [ON_CPU, script, *arguments(layout, steps, folder)]
    sys.stdout = sys.stderr
    if mode == "stock":
        sys.argv = line
        runpy.run_path(ON_CPU, run_name="__main__")
    else:
        command.main([*line, "--prefix-schedule", mode, *FLAGS.split()])
    lines = (folder / f"{layout}-{mode}.{rank}").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main():
    """Runs what the command line says."""
    script, *runs = sys.argv[1:]
    torch.compiler.set_stance("force_eager")
    run_on_cpu()
    import megatron.training  # noqa: F401  # once for all ranks
    from megatron.core.tokenizers import text  # noqa: F401  # transformers, which every rank asks for

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "whole", LENGTH)
        write_documents(folder / "half", LENGTH // 2)
        for named in runs:
            layout, mode, steps = [*named.split(), "20"][:3]
            seen = {"run": named, "ranks": [], "error": ""}
            try:
                size = worker.layout_of(layout).world_size
                seen["ranks"] = worker.run_ranks(
                    size, run, script, layout, mode, steps, folder, timeout_s=240.0
                )
            except Exception:  # noqa: BLE001  # the next run tells its own story
                seen["error"] = traceback.format_exc()
            print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
