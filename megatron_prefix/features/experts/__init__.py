"""Mixture of experts: routers count every rollout that a computed token stands for.

A router's auxiliary losses are sums over the tokens of a microbatch, prompts included, and its bias
counts every token of the step. A position of a segment is computed once and stands for one token of
every rollout that shares it ("Schedule-Level Shared-Prefix Reuse for LLM RL Training", section 4.6
and appendix B). With E experts, k of them a token, and a microbatch of T tokens, of which C_i go to
expert i and whose scores of i sum to P_i, the load-balancing loss is

    coeff * E / (k * T^2) * sum_i C_i * P_i

and its gradient with respect to any token's scores is one vector, coeff * E / (k * T^2) * C. So a
forward only counts. When a segment's backward runs, all forwards of its microbatches have run
(`loss_ready_after` in plan/planner.py), so the vectors are known, and a position gets the sum of
its rollouts' vectors, as it gets the sum of their gK/gV. Waves, trees, chunks, pipelines and
activation recomputation need nothing special.

Differences between Megatron's versions are hidden by calling its own methods: they log a loss and
attach a gradient to it, which is its weight (megatron/core/transformer/moe/router.py, TopKRouter).
"""
