"""Rollout files with something changed: planned, or refused in one line."""

import gzip
import itertools
import random

from megatron_prefix.lab.data.rollouts import read_groups, write_rollouts
from megatron_prefix.lab.data.shorten import shorten
from tests.harness import fuzzing
from tests.harness.data import BUNDLED

NUM_CASES = 300


def test_a_changed_file_is_planned_or_refused_in_one_line(tmp_path):
    path, bad = tmp_path / "rollouts.jsonl", {}
    groups = [shorten(group, 30)[0] for group in itertools.islice(read_groups(BUNDLED), 3)]
    write_rollouts(path, [group for group in groups if group])
    text = path.read_text("utf-8")
    for seed in range(NUM_CASES):
        rng = random.Random(seed)
        content = fuzzing.changed_json_lines(rng, text)
        if seed % 10 == 0:
            content = fuzzing.changed_bytes(rng, gzip.compress(content, mtime=0))
        path.write_bytes(content)
        options = ("--pp", "2", "--max-tokens", "20") if seed % 2 else ("--min-gain", "0")
        bad[seed] = fuzzing.fault("plan", str(path), "--json", *options)
    assert not {seed: fault for seed, fault in bad.items() if fault}
