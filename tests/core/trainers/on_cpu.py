"""Runs Megatron-LM's pretrain_gpt.py on the CPU, as users run it, and keeps what its steps gave.

    torchrun --nproc-per-node 8 -m megatron_prefix.run tests/core/trainers/on_cpu.py \\
        FOLDER/pretrain_gpt.py --num-layers 2 ... --prefix-schedule on

Nothing of the script is changed. What megatron.training asks of a GPU is answered or left out
(`cpu_training.run_on_cpu`), and what `train_step` returns is kept: with `STEPS=FILE` rank r
writes FILE.r, a line of JSON a step with its losses and gradient norm, and at the end a digest of
the parameters.
"""

import hashlib
import json
import os
import runpy
import sys

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from tests.core.trainers.cpu_training import leave_out_gpus, run_on_cpu  # noqa: E402


class Kept:
    """Takes the place of `train_step`, and writes what it returns."""

    def __init__(self, train_step, path):
        self._train_step = train_step
        self._file = open(f"{path}.{os.environ['RANK']}", "w", encoding="utf-8")  # noqa: SIM115
        self._models = []

    def __call__(self, *args, **options):
        self._models = args[2]
        found = self._train_step(*args, **options)
        losses = {name: float(value) for name, value in found[0].items()}
        self._write({"losses": losses, "grad_norm": found[5], **_shared()})
        return found

    def close(self):
        """Writes the digest."""
        digest = hashlib.sha256()
        for model in self._models:
            for _, parameter in sorted(model.named_parameters()):
                digest.update(parameter.detach().numpy().tobytes())
        self._write({"parameters": digest.hexdigest()})
        self._file.close()

    def _write(self, line):
        self._file.write(json.dumps(line) + "\n")


def _shared():
    """What the schedule says of the last step; nothing, where it is Megatron's."""
    from megatron.training import training

    report = getattr(training.get_forward_backward_func(), "report", None)
    if report is None:
        return {}
    forest, decision = report.forest, report.decision
    return {
        "active": decision.share, "raw": forest.raw_tokens, "executed": forest.executed_tokens,
        "reason": decision.reason,
    }  # fmt: skip


def main():
    """Runs the script of the command line."""
    script = os.path.abspath(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.append(os.path.dirname(script))
    run_on_cpu()
    leave_out_gpus()
    from megatron.training import training

    kept = None
    if path := os.environ.get("STEPS"):
        training.train_step = kept = Kept(training.train_step, path)
    runpy.run_path(script, run_name="__main__")
    if kept is not None:
        kept.close()


if __name__ == "__main__":
    main()
