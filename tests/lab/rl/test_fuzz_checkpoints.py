"""Checkpoints with something changed: resumed, or refused in one line."""

import json
import random
import shutil

from tests.harness import fuzzing
from tests.harness.data import BUNDLED
from tests.harness.ranks import run_ranks

NUM_CASES = fuzzing.rounds(4, 40)
ARGUMENTS = (
    "train", str(BUNDLED), "--set", "num_layers=1", "--groups", "2", "--groups-per-step", "1",
    "--max-tokens", "40", "--json",
)  # fmt: skip
STEP = "checkpoints/step-000001"
FILES = {
    "metrics.jsonl": fuzzing.changed_json_lines, "checkpoints/latest": None,
    f"{STEP}/train.json": "json", f"{STEP}/metadata.json": "json", f"{STEP}/common.pt": None,
    f"{STEP}/.metadata": None, f"{STEP}/__0_0.distcp": None, f"{STEP}/__0_1.distcp": None,
}  # fmt: skip


def changed(rng, content, kind):
    if kind is None or rng.randrange(4) == 0:
        return fuzzing.changed_bytes(rng, content)
    if kind == "json":
        return json.dumps(fuzzing.changed_json(rng, json.loads(content))).encode()
    return fuzzing.changed_json_lines(rng, content.decode())


def faults(folder):
    """What is wrong with each case, all in one process: starting one takes longer than ten runs."""
    good, run = folder / "good", folder / "run"
    found = {
        "": fuzzing.fault(*ARGUMENTS, "--steps", "1", "--save-every", "1", "--output", str(good))
    }
    for name, kind in FILES.items():
        for seed in range(NUM_CASES):
            shutil.copytree(good, run)
            path = run / name
            content = changed(random.Random(f"{name} {seed}"), path.read_bytes(), kind)
            path.unlink()
            if seed:  # the first case is a file that is missing
                path.write_bytes(content)
            found[f"{name} {seed}"] = fuzzing.fault(
                *ARGUMENTS, "--steps", "2", "--output", str(run), "--resume"
            )
            shutil.rmtree(run)
    return {case: fault for case, fault in found.items() if fault}


def test_a_changed_checkpoint_is_resumed_or_refused_in_one_line(tmp_path):
    assert run_ranks(1, lambda: faults(tmp_path)) == [{}]
