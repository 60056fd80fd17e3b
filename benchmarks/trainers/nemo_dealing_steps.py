"""Updates and log-probs of NeMo-RL whose rollouts it deals and packs, and then as whole groups.

"sequences" in a layout's name: its policy loss is a mean over rollouts, "tokens": over tokens. Each
rank runs its shard of one batch: stock schedule with NeMo-RL's dealing, stock and prefix schedule
with whole groups. Both are compared with the first: gradients, losses, and log-probs in the batch's
order.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.trainers import nemo_rl_steps
from megatron_prefix.features.dealing.hooks import deal_after_import
from megatron_prefix.lab import runtime
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import get_forward_backward_func
from megatron_prefix.trainers.table import NEMO_RL
from tests.core.trainers import worker
from tests.core.trainers.both import CONFIG, Step, furthest, gradients
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import GROUPS, PROMPT, SIZE, rollouts, rows

PACKING = {
    "algorithm": "modified_first_fit_decreasing", "input_key": "input_ids",
    "input_lengths_key": "input_lengths", "sequence_length_pad_multiple": 1,
    "max_tokens_per_microbatch": 150,
}  # fmt: skip


class Policy:
    """NeMo-RL's, as far as it shards."""

    def __init__(self) -> None:
        self.cfg = {"megatron_cfg": {"moe_router_load_balancing_type": "none"}}

    def shards(self, data: Any, *, whole: bool) -> tuple[Any, list[int]]:
        """Shards, and the rollouts in their order; as NeMo-RL does it, or as whole groups."""
        shard = type(data).shard_by_batch_size
        num = parallel_state.get_data_parallel_world_size()
        parts = (shard if whole else shard.__wrapped__)(
            data, num, batch_size=None, sequence_packing_args=PACKING
        )
        return parts[0], parts[1]


def batch() -> Any:
    """The batch on the driver, with columns drawn by rollout."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    tokens, prompts = rollouts(*rows())
    num, width = len(tokens), max(map(len, tokens))
    data = BatchedDataDict(
        input_ids=torch.zeros(num, width, dtype=torch.long),
        input_lengths=torch.tensor(list(map(len, tokens))), sample_mask=torch.ones(num),
        token_mask=torch.zeros(num, width),
    )  # fmt: skip
    for row, (ids, prompt) in enumerate(zip(tokens, prompts, strict=True)):
        data["input_ids"][row, : len(ids)] = ids
        data["token_mask"][row, prompt : len(ids)] = 1
    scale = (1.0 + torch.arange(num) % 3)[:, None].expand(num, width)
    for name, value in (("prev_logprobs", -2.4), ("generation_logprobs", -2.4),
                        ("reference_policy_logprobs", -2.5), ("advantages", 0.5)):  # fmt: skip
        data[name] = scale * value
    return data


def loss_of(name: str, num: int) -> Any:
    """NeMo-RL's policy loss."""
    from nemo_rl.algorithms.loss import loss_functions as losses
    from nemo_rl.models.megatron import train

    config = losses.ClippedPGLossConfig(token_level_loss="tokens" in name)
    given = {"sequence_packing": {"enabled": True, "max_total_tokens": 200}}
    return train.LossPostProcessor(losses.ClippedPGLossFn(config), given, num_microbatches=num)


def run(name: str, chunk: Any, data: Any, schedule: Any, *, whole: bool) -> dict[str, Any]:
    """Gradients, the loss of all ranks, and log-probs by rollout."""
    from nemo_rl.models.megatron import data as nemo_data
    from nemo_rl.models.megatron import train

    train.get_forward_backward_func = lambda: schedule
    shards, order = Policy().shards(data, whole=whole)
    shard = shards[parallel_state.get_data_parallel_rank()]
    num, _ = shard.get_microbatch_iterator_for_packable_sequences_len()
    config = {"sequence_packing": {"enabled": True, "max_total_tokens": 200}}

    def given() -> Any:
        return nemo_data.make_processed_microbatch_iterator(
            shard.make_microbatch_iterator_for_packable_sequences(), config, "input_lengths", 1, 1,
            None, None,
        )  # fmt: skip

    with torch.no_grad():
        said = train.megatron_forward_backward(
            chunk, given(), num, 64, 1, train.LogprobsPostProcessor(config), forward_only=True
        )
    chunk.zero_grad_buffer()
    losses = train.megatron_forward_backward(
        chunk, given(), num, 64, 1, loss_of(name, num),
        global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=data["token_mask"].sum(),
    )  # fmt: skip
    loss = torch.stack([torch.as_tensor(float(batch["loss"])) for batch in losses]).sum()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    log_probs = in_order([batch["logprobs"] for batch in said], shards, order, data)
    return {"gradients": gradients([chunk]), "results": {"loss": loss, "logprobs": log_probs}}


def in_order(said: Any, shards: Any, order: list[int], data: Any) -> torch.Tensor:
    """Log-probs of this rank's rollouts at their places in the batch, and those of the others."""
    rank = parallel_state.get_data_parallel_rank()
    before = sum(other.size for other in shards[:rank])
    table = torch.zeros(data["input_ids"].shape)
    log_probs = [row for microbatch in said for row in microbatch]
    for number, row in zip(order[before : before + shards[rank].size], log_probs, strict=True):
        held = int(data["input_lengths"][number])
        table[number, : min(held, len(row))] = row[:held]
    torch.distributed.all_reduce(table, group=parallel_state.get_data_parallel_group())
    return table


def steps(name: str) -> list[Step]:
    """The passes with NeMo-RL's dealing, and with whole groups by both schedules."""
    nemo_rl_steps.prepare()
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    _, chunk = nemo_rl_steps.model_of(name, layout)
    prefix = get_forward_backward_func(
        prefix_config=CONFIG, samples=NEMO_RL.samples, masks_tokens=NEMO_RL.masks_tokens
    )
    data = batch()
    check_whole(data)
    own = run(name, chunk, data, stock_schedule(), whole=False)
    turns = (stock_schedule(), prefix)
    others = [run(name, chunk, data, schedule, whole=True) for schedule in turns]
    assert prefix.report is not None
    forest = prefix.report.forest
    return [
        Step(
            "update", forest.executed_tokens, forest.raw_tokens,
            tolerance(torch.float32, int(data["input_lengths"].sum())),
            max(furthest(other["gradients"], own["gradients"]) for other in others),
            max(furthest(other["results"], own["results"]) for other in others),
        )
    ]  # fmt: skip


def check_whole(data: Any) -> None:
    """Whether groups are on fewer ranks than before, and each rollout is there once."""
    spread = []
    for whole in (False, True):
        shards, order = Policy().shards(data, whole=whole)
        assert sorted(order) == list(range(GROUPS * SIZE))
        assert len({len(shard.micro_batch_indices[0]) for shard in shards}) == 1
        assert all(max(shard.micro_batch_lengths[0]) <= 150 for shard in shards)
        prompts = [{tuple(row[: PROMPT // 2].tolist()) for row in shard["input_ids"]}
                   for shard in shards]  # fmt: skip
        spread.append(sum(map(len, prompts)))
    assert spread[1] < spread[0], f"groups are on {spread} ranks"


if __name__ == "__main__":
    deal_after_import()
    run_on_cpu()
    worker.StandIns(*nemo_rl_steps.UNUSED)
    worker.main(["nemo_rl.models.megatron.train"], steps)
