"""Mixture of experts: routers see the tokens that rollouts stand for, not only those computed.

A router's auxiliary losses are sums over the tokens of one of the trainer's microbatches, prompts
included, and its bias counts every token of the step.  A row of a segment is computed once and
stands for one such token of every rollout that passes through it ("Schedule-Level Shared-Prefix
Reuse for LLM RL Training", section 4.6 and appendix B).  With E experts, k of them a token, and a
microbatch of T tokens, of which C_i go to expert i and whose scores of i sum to P_i, the
load-balancing loss is

    coeff * E / (k * T^2) * sum_i C_i * P_i

and its gradient with respect to any token's scores is one vector, coeff * E / (k * T^2) * C.  So a
forward only counts.  When a segment's backward runs, every forward of its microbatches has run
(their losses wait for it: `loss_ready_after` of plan/planner.py), the vectors are known, and a span
gets the sum of its rollouts' vectors: the superposition that gK/gV follow.  Waves, trees, chunks,
pipelines and activation recompute need nothing of their own.

What differs by version is asked of Megatron's own methods: they log a loss, and the gradient that
they attach to it is its weight (megatron/core/transformer/moe/router.py, TopKRouter).
"""
