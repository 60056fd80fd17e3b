"""GatedDeltaNet and Mamba2 in bfloat16: the error against fp32, beside the stock schedule's."""

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics.compare import Trace, Verdict
from megatron_prefix.lab.numerics.pooled import Errors
from tests.harness import hybrid, one_group, steps
from tests.harness.hybrid import GDN, MAMBA
from tests.harness.one_rank import one_rank


def trace(schedule, model, seed):
    logs, gradients = one_group.run(schedule, model, data=steps.group(seed, 4))
    return Trace(torch.stack([log["sum"].double() for log in logs]), gradients)


@pytest.mark.parametrize("name", [GDN, MAMBA])
def test_no_further_from_fp32_than_the_stock_schedule(name):
    with one_rank():
        model = hybrid.model_of(name, dtype=torch.bfloat16)
        exact = hybrid.model_of(name, dtype=torch.float32)
        unwrap(exact).load_state_dict(unwrap(model).state_dict())
        stock, ours = get_forward_backward_func(), one_group.schedule_with(chunk_tokens=5)
        errors = Errors()
        for seed in range(4):
            expected, truth = (trace(stock, chunk, seed) for chunk in (model, exact))
            errors.add(expected, trace(ours, model, seed), truth)
            forest = ours.report.forest
            assert forest.executed_tokens < forest.raw_tokens
    verdict = errors.judged(Verdict(0.0, 0.0, 0.0, 0.0, None))
    assert verdict.passed, verdict.failures
    assert 0.5 < verdict.grad_error_ratio_p50 < 1.1, "equal errors of nothing, else"
