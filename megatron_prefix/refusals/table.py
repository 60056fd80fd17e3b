"""[pure] Every refusal of the prefix schedule: its name, when it is in the way, and what to do.

A place that refuses raises `refused(NAME, values for its gaps)` (errors.py). What is `WRONG` can
never be right: a token's result depends on the other tokens that are computed with it, on chance,
or on tokens that follow. What is `NOT_YET` could be supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_prefix.errors import NOT_YET, WRONG, Refusal

_TRAINERS = """Megatron-LM Megatron-RL Megatron-Bridge verl miles ms-swift SkyRL RLinf
AReaL ROLL""".split()
GROUPS = {
    "config": "options of Megatron's TransformerConfig",
    "module": "layers and other modules of the model",
    "wrapper": "wrappers of the model",
    "call": "how a forward step calls the model",
    "step": "what forward steps and losses do besides calling the model",
    "mask": "attention masks, loss masks and positions of a call",
    "setting": "what is on around the schedule or a call, and our own settings",
    "output": "what the model returns, and losses",
    "routes": "routers that follow given routes",
    "ranks": "ranks that have to do the same side by side",
    "package": "mistakes of this package, and steps that it could not undo",
    **{name: f"{name}'s options" for name in _TRAINERS},
}
"""Values of `Refusal.where`, in the order in which they are listed."""


Test = Callable[[str, Any], bool]
"""(name of the option, config) -> whether it is in the way. A function of this file, or a partial
of one, so that a refusal can be sent to another rank."""


def _is_on(name: str, config: Any) -> bool:
    return bool(getattr(config, name, None))


def _with_experts(name: str, config: Any) -> bool:
    return _is_on("num_moe_experts", config) and _is_on(name, config)


def _cut_wider(name: str, config: Any) -> bool:
    parts = getattr(config, name, None) or 1
    return _is_on("num_moe_experts", config) and parts > config.tensor_model_parallel_size


def _other_than(name: str, config: Any, *, usual: str) -> bool:
    return getattr(config, name, usual) not in (usual, None)


def _balances(name: str, config: Any, *, kinds: tuple[str, ...], negated: bool = False) -> bool:
    types = getattr(config, name, "none")
    types = [types] if isinstance(types, str) else types
    return _is_on("num_moe_experts", config) and any((kind in kinds) != negated for kind in types)


def _repeats_with(name: str, config: Any, *, kinds: tuple[str, ...]) -> bool:
    repeats = _is_on(name, config) and (getattr(config, "mtp_num_layers", None) or 0) > 1
    return repeats and _balances(_BALANCING, config, kinds=kinds)


def _scaled_by(name: str, config: Any, *, recipes: tuple[str, ...], negated: bool = False) -> bool:
    recipe = getattr(config, name, "delayed")  # Megatron's default
    return _is_on("fp8", config) and (recipe in recipes) != negated


def _with_context(name: str, config: Any) -> bool:
    return _is_on(name, config) and getattr(config, "context_parallel_size", 1) > 1


def _option(
    name: str, kind: str, fix: str, test: Test = _is_on, attribute: str | None = None
) -> Refusal:
    """An option of TransformerConfig, which may be called otherwise than its attribute."""
    return Refusal(name, "config", kind, fix, partial(test, attribute or name))


# One refusal a line, however long.
# fmt: off
# --- config ---------------------------------------------------------------------------------------

_DROPS = "set it to 0: copies of a prompt would drop different values"
_SCALES = "scaling factors depend on what shares a tensor"
_ROOM = "leave it out: copies of a prompt token would have room or not"
_CHANCE = "leave it out: copies of a prompt token would draw different experts"
_BALANCE = "use aux_loss, seq_aux_loss or global_aux_loss: "
_COUPLED = _BALANCE + "every token's experts depend on the others"
_OWN_PLAN = "turn it off: it needs Megatron's own schedule plan"
_LARGEST = "it reads the largest score of every attention call"
_LENGTHS = "segments differ in length"
_BALANCING = "moe_router_load_balancing_type"
_KNOWN = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing")

HIDDEN_DROPOUT = _option("hidden_dropout", WRONG, _DROPS)
ATTENTION_DROPOUT = _option("attention_dropout", WRONG, _DROPS)
FP8_DELAYED = _option("fp8_recipe delayed", WRONG, f"use blockwise or mxfp8: {_SCALES}", partial(_scaled_by, recipes=("delayed",)), "fp8_recipe")
FP8_TENSORWISE = _option("fp8_recipe tensorwise", WRONG, f"use blockwise or mxfp8: {_SCALES}", partial(_scaled_by, recipes=("tensorwise",)), "fp8_recipe")
FP8_OTHER = _option("fp8_recipe of another name", NOT_YET, "use blockwise or mxfp8: this package does not know the recipe", partial(_scaled_by, recipes=("delayed", "tensorwise", "blockwise", "mxfp8"), negated=True), "fp8_recipe")
FP8_ATTENTION = _option("fp8_dot_product_attention", WRONG, f"turn it off: {_SCALES}")
FP8_HEADS = _option("fp8_multi_head_attention", WRONG, f"turn it off: {_SCALES}")
FP8_ROUTES = _option("moe_router_padding_for_quantization", NOT_YET, "turn it off (experts pad their own inputs): it makes a token's experts depend on other tokens", _with_experts)
FP8_HEAD = _option("fp8_output_proj", NOT_YET, "turn it off: the output layer runs only on positions with loss")
FP4 = _option("fp4", NOT_YET, "train in bf16 or in FP8: FP4 was not tested; scales of whole tensors and stochastic rounding would have to be off")
QUANT_RECIPE = _option("quant_recipe", WRONG, f"leave it out: {_SCALES}")
MTP_REPEATED = _option("mtp_use_repeated_layer with global_aux_loss", NOT_YET, "use aux_loss or seq_aux_loss: the router's running average goes from depth to depth", partial(_repeats_with, kinds=("global_aux_loss",)), "mtp_use_repeated_layer")
MTP_MIXED = _option("mtp_hsm", WRONG, "turn it off: it mixes hidden states of later positions into earlier ones")
MTP_ALONE = _option("mtp_standalone", NOT_YET, "put multi-token prediction on the last stage, with the loss")
MTP_OUTPUT = _option("mtp_isolated_loss", NOT_YET, "use mtp_detach_heads, which replaces this option")
QK_CLIP = _option("qk_clip", NOT_YET, f"use the stock schedule: {_LARGEST}")
LARGEST_LOGIT = _option("log_max_attention_logit", NOT_YET, f"turn it off: {_LARGEST}")
OVERLAPPED_EXPERTS = _option("overlap_moe_expert_parallel_comm", NOT_YET, _OWN_PLAN)
DELAYED_WGRAD = _option("delay_wgrad_compute", NOT_YET, _OWN_PLAN)
PARTIAL_CHECKPOINTS = _option("num_microbatches_with_partial_activation_checkpoints", NOT_YET, "leave it out: it changes the arguments of forward steps")
VISION_OVER_CP = _option("vision_dp_when_cp", NOT_YET, "turn it off: gradients of images cross context-parallel ranks in every microbatch's own backward", _with_context)
HYBRID_CP = _option("hybrid_context_parallel", NOT_YET, "turn it off: it has a training loop of its own")
ACTIVATION_OFFLOADING = _option("fine_grained_activation_offloading", NOT_YET, "turn it off: it asserts the stock order of backward passes")
CPU_OFFLOADING = _option("cpu_offloading", NOT_YET, "turn it off: it assumes the stock order of backward passes")
BATCH_INVARIANT = _option("batch_invariant_mode", WRONG, "leave it out (miles: --true-on-policy, too): with segments a token's log-prob is that of its whole rollout to rounding, not bit for bit")
CUDA_GRAPH = _option("enable_cuda_graph", NOT_YET, f"turn it off, and set graph_tokens instead: {_LENGTHS}")
CUDA_GRAPH_IMPL = _option("cuda_graph_impl", NOT_YET, f"set it to 'none', and set graph_tokens instead: {_LENGTHS}", partial(_other_than, usual="none"))
FLASH_DECODE = _option("flash_decode", WRONG, "turn it off: it is for generation and bypasses core attention")
FUSED_ROPE = _option("fused_single_qkv_rope", NOT_YET, "turn it off: it applies one rotary table to a whole row")
CAPACITY = _option("moe_expert_capacity_factor", WRONG, _ROOM, _with_experts)
RANK_CAPACITY = _option("moe_expert_rank_capacity_factor", WRONG, _ROOM, _with_experts)
PADDED_CAPACITY = _option("moe_pad_expert_input_to_capacity", WRONG, _ROOM, _with_experts)
TOKEN_DROPPING = _option("moe_token_dropping", WRONG, "leave it out: copies of a prompt token would be dropped or not", _with_experts)
JITTER = _option("moe_input_jitter_eps", WRONG, "leave it out: copies of a prompt token would draw different noise", _with_experts)
RANDOM_EXPERTS = _option("moe_router_force_load_balancing", WRONG, _CHANCE, _with_experts)
BIASED_EXPERTS = _option("moe_router_force_biased", WRONG, _CHANCE, _with_experts)
SINKHORN = _option(f"{_BALANCING} sinkhorn", WRONG, _COUPLED, partial(_balances, kinds=("sinkhorn",)), _BALANCING)
QUANTILES = _option(f"{_BALANCING} quantile_balancing", WRONG, _COUPLED, partial(_balances, kinds=("quantile_balancing",)), _BALANCING)
OTHER_BALANCING = _option(f"{_BALANCING} of another name", NOT_YET, f"{_BALANCE}it is not known here", partial(_balances, kinds=_KNOWN, negated=True), _BALANCING)
WIDE_EXPERTS = _option("expert_tensor_parallel_size above tensor_model_parallel_size", NOT_YET, "set it to at most tensor_model_parallel_size: data-parallel ranks that hold parts of one expert would wait for one another, but their segments differ", _cut_wider, "expert_tensor_parallel_size")
PAGED_STASH = _option("moe_paged_stash", NOT_YET, "turn it off: it assumes the stock order of backward passes", _with_experts)

# --- modules --------------------------------------------------------------------------------------

OLD_MEGATRON = Refusal("megatron-core … is too old", "module", NOT_YET, "install … or newer")
OWN_FORWARD = Refusal("layer …'s attention …, which has a forward of its own", "module", NOT_YET, "use Megatron's SelfAttention, or the stock schedule")
OTHER_CORE = Refusal("layer …'s core attention …", "module", NOT_YET, "use Megatron's DotProductAttention or TEDotProductAttention, or the stock schedule")
MASK_TYPE = Refusal("layer …'s attn_mask_type …", "module", WRONG, "use causal attention, or the stock schedule")
NO_LANGUAGE_MODEL = Refusal("a model with … language models of Megatron's", "module", NOT_YET, "give a model with one GPTModel, or one MambaModel, which owns its decoder")
OTHER_FORWARD = Refusal("…, which has a forward of its own", "module", NOT_YET, "use the stock schedule: segments would skip what it does before or after Megatron's forward")
GRADIENT_HOOKS = Refusal("hooks on the gradient of …", "module", WRONG, "change gradients after the schedule: a hook would see the gradients of segments, not of microbatches")
MLA_WITHOUT_SP = Refusal("multi-latent attention with tensor parallelism and without sequence parallelism", "module", WRONG, "turn sequence_parallel on: Megatron's own gradients of the projections to latents are of each rank's heads only")
MLA_CACHE = Refusal("cache_mla_latents", "module", WRONG, "turn it off: it is for generation")
MLA_WINDOW = Refusal("multi-latent attention with a sliding window", "module", NOT_YET, "leave window_size out, or use the stock schedule")
MLA_FUSED_ROPE_CP = Refusal("multi-latent attention with apply_rope_fusion and context parallelism", "module", NOT_YET, "turn apply_rope_fusion off: its kernel counts positions itself")
DSA_LOSS = Refusal("a loss of DSA's indexer (dsa_indexer_loss_coeff) with …", "module", NOT_YET, "leave one of the two out: set dsa_indexer_loss_coeff to 0")
DSA_CP = Refusal("DSA with context parallelism", "module", NOT_YET, "use tensor parallelism instead")
DSA_INDEX_SHARED = Refusal("dsa_indexer_topk_freq above 1", "module", NOT_YET, "set it to 1: layers without an indexer take another layer's keys, which are one microbatch's")
DSA_RECOMPUTED = Refusal("DSA with core_attn in recompute_modules", "module", WRONG, "leave core_attn out: Megatron's own checkpoint does not give core attention the indexer's input")
WINDOW_AHEAD = Refusal("window_size …", "module", NOT_YET, "give (positions before, 0), with at least one before")
WINDOW_FUSED = Refusal("window_size with masked_softmax_fusion in 16 bit", "module", WRONG, "turn masked_softmax_fusion off: Megatron's fused kernel ignores the window for some lengths")
FUSED_YARN = Refusal("apply_rope_fusion with YaRN's scale of queries and keys in …", "module", NOT_YET, "turn apply_rope_fusion off: this Megatron-Core's fused kernel leaves that scale out of packs and not of rows, and which it is is not known here")
NO_SINKS = Refusal("softmax_type …, and core attention without softmax_offset", "module", NOT_YET, "use Megatron's DotProductAttention or TEDotProductAttention, which have it")
WINDOW_CP = Refusal("a sliding window with context parallelism and cp_comm_type …", "module", NOT_YET, "set cp_comm_type to a2a or all_gather: transformer-engine itself has windows with these only")
SINKS_CP = Refusal("softmax_type … with context parallelism and cp_comm_type …", "module", NOT_YET, "set cp_comm_type to a2a: transformer-engine itself has sinks with it only")
LEARNED_SINKS_CP = Refusal("transformer-engine's learned sinks with context parallelism", "module", NOT_YET, "use tensor parallelism instead: by its code (not run), every rank has the gradient of all ranks' queries, so that Megatron's sum over ranks counts it several times")
OTHER_ROTARY = Refusal("rotary embedding …", "module", NOT_YET, "use Megatron's RotaryEmbedding or YarnRotaryEmbedding, or the stock schedule")
ROTARY_TABLES = Refusal("the model gives its layers rotary_pos_emb …, and its rotary_pos_emb makes one table for all", "module", NOT_YET, "use the stock schedule")
DROPOUT = Refusal("dropout of … in …", "module", WRONG, _DROPS)
MODEL_DRAWS = Refusal("random numbers (…) are drawn inside the model's call", "module", WRONG, "leave out what draws them (noise of a hook, dropout in an adapter): copies of a prompt would draw different values")
UNMARKED_BIAS = Refusal("the bias of …, whose weight alone is marked for sequence parallelism", "module", WRONG, "mark it, too (bias.sequence_parallel = True), or leave it out: its gradient is of each rank's own positions")
OTHER_ROUTER = Refusal("layer …'s router …", "module", NOT_YET, "use Megatron's TopKRouter")
ROUTES_IN_ORDER = Refusal("layer …'s router takes its routes from a queue that is not known", "module", NOT_YET, "use the stock schedule, or a queue as slime's and miles' routing replay has it")
OTHER_MIXER = Refusal("layer …'s mixer …", "module", NOT_YET, "use Megatron's own attention, GatedDeltaNet or MambaMixer, or the stock schedule")
OTHER_SYMBOLS = Refusal("hybrid layers …", "module", NOT_YET, "use the symbols M (Mamba2), G (GatedDeltaNet), * (attention), - (MLP) and E (experts)")
OWN_POSTPROCESS = Refusal("…'s own _postprocess, with multi-token prediction", "module", NOT_YET, "use that of Megatron's GPTModel (verl's, mbridge's and ROLL's patches replace it), or the stock schedule")
SPLIT_IMAGES = Refusal("…, whose context-parallel ranks share the images of a call", "module", WRONG, "freeze its vision tower, or leave context parallelism out: a rank gets no gradient of its images from rows of other ranks, so that gradients depend on which copy of an image it has")
IMAGES_OF_RANKS = Refusal("…, whose tensor- and context-parallel ranks share the images of a call", "module", WRONG, "freeze its vision tower (ROLL: freeze_module_prefix), or leave both out: a rank gets no gradient of its images from rows of other ranks, so that gradients depend on which copy of an image it has")
OTHER_AHEAD = Refusal("multi-token prediction by …", "module", NOT_YET, "use Megatron's MultiTokenPredictionLayer, or the stock schedule")
DETERMINISTIC = Refusal("deterministic_mode with recurrent layers", "module", NOT_YET, "turn it off: its recurrences take no states")
MAMBA_PATH = Refusal("use_mamba_mem_eff_path off", "module", NOT_YET, "turn it on: the other path takes no initial states")
DELTA_CP = Refusal("GatedDeltaNet with context parallelism", "module", NOT_YET, "install megatron-core 0.18 or newer")
OWN_DSA_ALIGNED = Refusal("slime's sparse attention with …, which makes it SGLang's", "module", NOT_YET, "leave it out: its kernels and rotary positions were not tried in segments")
OWN_DSA_MTP = Refusal("a trainer's own sparse attention with multi-token prediction", "module", NOT_YET, "leave --mtp-num-layers out: a layer behind the decoder may follow choices that it does not have")
OWN_DSA_REPLAY = Refusal("an indexer's choices that replay, …", "module", NOT_YET, "leave --use-indexer-replay and --use-rollout-indexer-replay out")
OWN_DELTA_CP = Refusal("a trainer's own GatedDeltaNet with context parallelism", "module", NOT_YET, "use tensor parallelism instead, or the stock schedule")
OWN_DELTA_CUT = Refusal("slime's GatedDeltaNet with context parallelism, whose ranks drop gradients of one another's positions", "module", WRONG, "use tensor parallelism, Megatron's own GatedDeltaNet, or miles' context parallelism by flash-linear-attention: layers below it get wrong gradients in either schedule")
OWN_DELTA_HEADS = Refusal("a trainer's own … of … and … heads on … context-parallel ranks", "module", NOT_YET, "use a number of ranks that divides both: each runs its part of the heads")
OWN_DELTA_STAGES = Refusal("a trainer's own GatedDeltaNet, and a pipeline stage without any", "module", NOT_YET, "use fewer stages, or the stock schedule: only a stage that has one knows its sizes")
OWN_DELTA_MIXES = Refusal("layer …'s …, which mixes positions outside of its convolution and its recurrence", "module", NOT_YET, "use the stock schedule")
KIMI_SUMS = Refusal("tensor parallelism, and …, whose gradient this Megatron does not sum over ranks", "module", WRONG, "use a Megatron-Core whose finalize_model_grads reads sum_gradients_across_tp_domain, or other parallelism: each rank keeps a part of it in either schedule")
DELTA_KERNEL = Refusal("…'s kernel does not work here (…)", "module", NOT_YET, "see `megatron-prefix doctor`, or use the stock schedule")
QUANTISER_DYNAMIC = Refusal("quantiser …, whose scale is of a whole tensor", "module", WRONG, "calibrate it, so that its scale is static, or use one scale per token: a token's quantisation would depend on the other tokens of its call")
QUANTISER_CALIBRATES = Refusal("quantiser …, which is being calibrated", "module", WRONG, "wait until calibration has ended: it would count a shared prompt once, and padding")
QUANTISER_MLA = Refusal("quantiser … of multi-latent attention", "module", NOT_YET, "disable quantisers of queries, keys and values: a segment makes keys of its ancestors' latents again")
QUANTISER_OTHER = Refusal("quantiser … with …", "module", NOT_YET, "use static scales of a tensor or a feature, or one a token")

# --- wrappers -------------------------------------------------------------------------------------

FULLY_SHARDED = Refusal("parameters sharded by …", "wrapper", NOT_YET, "use DistributedDataParallel without FSDP, which reduces at every backward")
TORCH_DDP = Refusal("a model in torch's own DistributedDataParallel", "wrapper", NOT_YET, "use Megatron's DistributedDataParallel: torch's reduces gradients in the backward of its own forward, which segments do not call")
DDP_DELAYED_WGRAD = Refusal("delay_wgrad_compute of DDP", "wrapper", NOT_YET, _OWN_PLAN)
OFFLOAD_FP8 = Refusal("memory policy offload with fp8", "wrapper", NOT_YET, "use retain or recompute: the quantised weights of every segment would go to the host", ends=True)
OFFLOAD_OVERLAP = Refusal("memory policy offload with gradient_accumulation_fusion and overlap_grad_reduce", "wrapper", NOT_YET, "turn overlap_grad_reduce off, or use recompute", ends=True)

# --- calls ----------------------------------------------------------------------------------------

INFERENCE_CONTEXT = Refusal("a model call with inference_context", "call", WRONG, "leave it out: it is for generation")
INFERENCE_PARAMS = Refusal("a model call with inference_params", "call", WRONG, "leave it out: it is for generation")
PADDING_MASK = Refusal("a model call's padding_mask leaves tokens out, and routers count tokens", "call", NOT_YET, "leave it out (verl's and Megatron's dynamic context parallelism set it): it keeps padding out of the routers' losses")
OTHER_TENSORS = Refusal("a model call with …, which has tensors", "call", NOT_YET, "leave it out: only input_ids, position_ids, labels and loss_mask can be cut into segments")
SOME_HAVE = Refusal("some model calls of the step have … and some have none", "call", NOT_YET, "give it to all or to none")
EMPTY_ARGUMENT = Refusal("a model call with …, which is empty", "call", NOT_YET, "leave it out: what the model would put into it is one thing per segment, not per microbatch")
FILLED = Refusal("the model puts more than weights into the … of its call", "call", NOT_YET, "let it return what is per position, or leave the keyword out: calls of one step get what a segment's call has put there")
AHEAD_HEAD = Refusal("multi-token prediction, and a head of the trainer's own that makes no logits", "call", NOT_YET, "leave out one of the two: such heads make no logits for further tokens either")
DIFFERENT_ARGUMENTS = Refusal("model calls of one step differ in …", "call", NOT_YET, "give all microbatches the same")
NO_POSITION = Refusal("a model call has no positions", "call", NOT_YET, "leave empty microbatches out")
NO_TOKENS = Refusal("model calls of the first pipeline stage have no input_ids", "call", NOT_YET, "give them the tokens")
AHEAD_FACTOR = Refusal("multi-token prediction with calculate_per_token_loss, whose loss verl multiplies by another number in every microbatch", "call", NOT_YET, "leave calculate_per_token_loss out")
AHEAD_TOKENS = Refusal("model calls of the last pipeline stage have no input_ids, and the model has multi-token prediction", "call", NOT_YET, "give them the tokens there, too: Megatron itself needs them")
AHEAD_GIVEN = Refusal("multi-token prediction, and calls that give embeddings without input_ids of the same positions", "call", NOT_YET, "give the tokens, too, as Megatron-Bridge's and mbridge's models do: its layers embed them")
AHEAD_LABELS = Refusal("model calls have no labels, and multi-token prediction needs them before megatron-core 0.19", "call", NOT_YET, "give them labels: Megatron itself fails without")
AHEAD_IDLE = Refusal("multi-token prediction that no call asks for, in a model with experts", "call", NOT_YET, "leave mtp_num_layers out, or train it (slime, miles: --enable-mtp-training): its routers would count tokens that they never see")
AHEAD_KEYWORD = Refusal("model calls with …, in which a call gives labels, or no loss_mask, or other tokens than its input_ids", "call", NOT_YET, "give all microbatches the tokens of input_ids there, a loss_mask and no labels, as slime and miles do")
OTHER_PACKING = Refusal("packed_seq_params has qkv_format …", "call", NOT_YET, "give 'thd', or no packing")
PACKS_INSIDE = Refusal("a pack in …, which packs rows inside", "call", NOT_YET, "give it padded rows (ROLL: leave out use_sequence_packing): its call also has tensors that are not packed")
COLUMN_LENGTH = Refusal("… of a model call has … of … positions", "call", NOT_YET, "give one for every position of input_ids")
STAGES_DIFFER = Refusal("the last stage's labels and the tokens differ in their number of positions", "call", NOT_YET, "call the model on every stage with the same samples")
NO_TREE = Refusal("the first pipeline stage cannot build the step's tree", "call", NOT_YET, "see the error of that stage")
NO_CALL = Refusal("the forward step does not call the model", "call", NOT_YET, "return the model's output for every microbatch: microbatches are taken from that call")
TWO_CALLS = Refusal("the forward step calls the model more than once", "call", NOT_YET, "use the stock schedule (mode off or auto) for such steps: each microbatch must make one call (without pipeline stages, further calls without gradients are fine)")
BESIDE_LOGITS = Refusal("the forward step calls the model without gradients for logits, beside the call with gradients", "call", NOT_YET, "give that call labels, so that it returns one number a position, or make it before the schedule: they would be there for all microbatches at once")
CALL_IN_LOSS = Refusal("the loss calls the model", "call", NOT_YET, "call it before the schedule (reference log-probs), or use the stock schedule")
CALL_IN_BACKWARD = Refusal("the model is called in a backward", "call", NOT_YET, "leave out a reentrant checkpoint around the model call: use Megatron's recompute_granularity")
OVERWRITTEN = Refusal("… of microbatch … is overwritten by a later forward step", "call", NOT_YET, "give every microbatch tensors, dicts and lists of its own (no static buffers): all forward steps run before the first segment")

# --- forward steps and losses ---------------------------------------------------------------------

DRAWN_AGAIN = Refusal("the data iterator yields one … again, with other values", "step", NOT_YET, "yield a new one for every microbatch: all forward steps run before the first loss")
RANDOM_IN_BOTH = Refusal("random numbers (…) are drawn both before the model call and after it", "step", WRONG, "draw in one of the two, or from a generator of its own: all forward steps run before the first loss")
DATA_EXCHANGE = Refusal("forward steps or losses exchange with other data-parallel ranks", "step", WRONG, "communicate in losses only, in mode auto and without expert parallelism, or before the schedule or after it: each rank has its own order of segments")
LOSS_LEAVES = Refusal("a loss sets …, which the next forward step reads before its model call", "step", WRONG, "set it before the schedule or after it: all forward steps run before the first loss")
LOSS_READS = Refusal("the loss reads what the model has computed inside, not only its output", "step", NOT_YET, "leave out hooks that keep activations for the loss, or use the stock schedule: they would see segments")

# --- masks ----------------------------------------------------------------------------------------

NOT_CAUSAL = Refusal("the attention_mask of a model call is not causal", "mask", WRONG, "leave out --reset-attention-mask, and pack samples with packed_seq_params (a mask [samples, positions] that only cuts off the ends is taken with transformer-engine's attention)")
NO_MASK = Refusal("a model call has no attention_mask, and the layers' attn_mask_type is arbitrary", "mask", WRONG, "give a causal one, or build the model with attn_mask_type causal")
ODD_SLICES = Refusal("a sample has … positions on a context-parallel rank, which are not two chunks", "mask", NOT_YET, "pad samples to a multiple of …, twice the context-parallel size, and give every rank its slice of the zig-zag")
CONTIGUOUS = Refusal("context-parallel ranks hold … of a call, and attention is for another order", "mask", NOT_YET, "slime and miles: give --allgather-cp for their own sparse attention, and leave it out for all else; give every rank its chunks of Megatron's zig-zag")
NO_POSITION_IDS = Refusal("the model looks at positions, and a model call's position_ids are not one for every position", "mask", NOT_YET, "give them in the shape of input_ids, three of them with multimodal rope")
OTHER_POSITIONS = Refusal("position_ids of a sample do not count from 0, and the model learns positions", "mask", NOT_YET, "pack samples without padding in front")
AHEAD_NOTHING = Refusal("a microbatch has no position for the loss of multi-token prediction", "mask", WRONG, "leave it out, or use calculate_per_token_loss or megatron-core 0.17: this one divides by zero")
AHEAD_BEHIND = Refusal("a pack has positions behind its last sample, and labels there count for multi-token prediction", "mask", WRONG, "give them a loss_mask of zero, or an entry of cu_seqlens: Megatron does not move them by one")
AHEAD_PADDED = Refusal("multi-token prediction, and packs whose cu_seqlens_q leaves out padding that cu_seqlens_q_padded counts", "mask", WRONG, "give cu_seqlens_q the padded ends, too: Megatron moves labels by it, and so takes labels of other samples")
KIMI_PADDED = Refusal("Kimi Delta Attention, and packs whose cu_seqlens_q leaves out padding that cu_seqlens_q_padded counts", "mask", WRONG, "give cu_seqlens_q the padded ends, too: the layers begin samples by it, and so states run on into other samples")
STRAY_GRADIENT = Refusal("a gradient reaches positions without loss, which were not computed", "mask", WRONG, "the loss looks at positions that the call's loss_mask, or the callback `trained`, says carry none; correct it, or leave both out (a trainer's own mask: MEGATRON_PREFIX_TRAINER_MASKS=false)")

# --- settings -------------------------------------------------------------------------------------

FP8_AROUND = Refusal("transformer-engine's fp8 autocast is on around the schedule", "setting", WRONG, f"leave it out: {_SCALES}")
FP8_INSIDE = Refusal("the forward step calls the model inside transformer-engine's fp8 autocast", "setting", WRONG, f"leave it out, or use mode off: {_SCALES}")
FP8_UNTRIED = Refusal("fp8_recipe mxfp8 in mode auto", "setting", NOT_YET, "use mode on, after `megatron-prefix align` with this recipe: it has run in an emulation on CPUs, but not on a GPU")
TORCH_MODES = Refusal("the forward step calls the model inside a torch function or dispatch mode, inference_mode or saved_tensors_hooks, which cannot be suspended", "setting", NOT_YET, "enter it before the schedule is called")
DIFFERENT_AUTOCAST = Refusal("model calls of one step run under different autocast settings", "setting", NOT_YET, "give all the same")
SWITCHED = Refusal("the forward step changes … of the model around its call", "setting", NOT_YET, "set it before the schedule, or use the stock schedule: a segment serves several microbatches (adapters may be off for other calls, without gradients)")
STATE_LOST = Refusal("the forward step writes into … of the model between model calls, which it did not in its first steps", "setting", NOT_YET, "write it before the schedule, or use mode off: what earlier microbatches had there is lost", ends=True)
TRAINING_MODE = Refusal("the forward step calls model.train() or model.eval() around its model call", "setting", NOT_YET, "call it before the schedule")
FORWARD_COUNTS = Refusal("a call with forward_only and gradients enabled, in which routers count tokens", "setting", NOT_YET, "call the schedule under torch.no_grad(): else Megatron adds such a pass to expert biases and to the log of auxiliary losses")
SCALES_INTERLEAVED = Refusal("a function of the trainer's own scales auxiliary losses (grad_scale_func, moe_grad_scale_func, mtp_grad_scale_func), and there are virtual pipeline stages", "setting", NOT_YET, "use the optimizer's scale_loss: with virtual stages Megatron scales a microbatch's losses of routers by what the function says of a later one")
SCALES_ORDER = Refusal("a function of the trainer's own scales losses (grad_scale_func, moe_grad_scale_func, mtp_grad_scale_func), and segments would call it in another order than microbatches", "setting", NOT_YET, "use the optimizer's scale_loss, as another function may count its calls; or put rollouts of one prompt into neighbouring microbatches")
HOST_LAYERS_CP = Refusal("cache_host_layers is for whole sequences, and there are context-parallel ranks", "setting", NOT_YET, "set it to 0: they exchange K/V and gK/gV from device memory", ends=True)

# --- outputs --------------------------------------------------------------------------------------

OTHER_OUTPUT = Refusal("the model returns a …, in which the prefix schedule finds no tensors", "output", NOT_YET, "return a tensor, a dict, a tuple, or register it with torch.utils.pytree")
OTHER_SHAPE = Refusal("the model returns a tensor of shape … for … positions", "output", NOT_YET, "return what is per position: [batch, positions, ...], [positions, batch, ...] or [positions]")
FLAT_ROWS = Refusal("the model returns [positions] for … rows, whose order in it is not known", "output", NOT_YET, "return [batch, positions], or pack the samples")
DIFFERENT_OUTPUTS = Refusal("outputs of the model differ from segment to segment in …", "output", NOT_YET, "return what is per position: everything else must be the same for all")
OTHER_SENT = Refusal("the forward step gives the next pipeline stage something else than what the model returns", "output", NOT_YET, "return the model's output on stages without a loss, and compute a reference before the schedule: stages exchange segments of the model")
CHANGED_OUTPUT = Refusal("the forward step changes what the model returns on a stage that has no loss", "output", NOT_YET, "let it change the last stage's output only")
NOT_VERIFIED = Refusal("the prefix schedule's step differs from the stock schedule's by more than rounding: …", "output", NOT_YET, "keep the stock schedule for this model and loss (mode off) and report it: `verify` ran both on the same microbatches")

FORWARD_GRAPH = Refusal("results of a call with forward_only need gradients", "output", NOT_YET, "detach them, call the schedule under torch.no_grad(), or without forward_only: segments run without gradients there")

# --- routes ---------------------------------------------------------------------------------------

SOME_ROUTES = Refusal("some microbatches have routes and some have none", "routes", NOT_YET, "give routes to all or to none")
NUMBER_OF_ROUTES = Refusal("… routes for … positions", "routes", NOT_YET, "give one route for each position")
RECORDS_ROUTES = Refusal("RouterReplay records routes, and segments run in another order than microbatches", "routes", NOT_YET, "run this pass with the stock schedule (mode off)")
AHEAD_ROUTES = Refusal("a router of multi-token prediction that replays", "routes", NOT_YET, "set no action on it, so that it chooses for itself: routes are of the decoder's layers")
UNKNOWN_ROUTES = Refusal("RouterReplay's action is …, and the step's routes are not known", "routes", NOT_YET, "set those of each microbatch in its forward step, before the model call, or give get_forward_backward_func the callback `routes`")

# --- ranks ----------------------------------------------------------------------------------------

DIFFERENT_PROGRAMS = Refusal("the ranks of an expert-parallel group have different plans, of … actions", "ranks", NOT_YET, "give the stock schedule equally many microbatches on each, and no plan file", ends=True)
ACROSS_NO_GROUP = Refusal("across_ranks, and process groups without dp_cp", "ranks", NOT_YET, "add it to the trainer's groups, or set across_ranks to off")
ACROSS_EXPERTS = Refusal("across_ranks with expert parallelism and moe_token_dispatcher_type allgather", "ranks", NOT_YET, "use alltoall: the all-gather wants equally many tokens on every rank, and only one of them runs a prompt; or set across_ranks to auto: every rank then shares what it has")
ACROSS_PLAN = Refusal("across_ranks with a plan file", "ranks", NOT_YET, "leave it out, or set across_ranks to off")
ACROSS_GATHERS = Refusal("across_ranks with overlap_param_gather", "ranks", NOT_YET, "turn that off, as weights would be gathered in another order on every rank; or set across_ranks to off")
ACROSS_UNREDUCED = Refusal("across_ranks with a model that is not in Megatron's DistributedDataParallel", "ranks", NOT_YET, "wrap it, say sums_gradients=True to get_forward_backward_func if the trainer itself sums gradients over data-parallel ranks, or set across_ranks to off: until they are summed, a rank's own gradients are not the stock schedule's")
ACROSS_SCALES = Refusal("across_ranks with multi-token prediction and a function of the trainer's own that scales its loss (grad_scale_func, mtp_grad_scale_func)", "ranks", NOT_YET, "use the optimizer's scale_loss, or set across_ranks to off: weights of the loss are sent before the function is called")
ACROSS_INDEXER = Refusal("across_ranks with a loss of DSA's indexer, or choices of an indexer that replay", "ranks", NOT_YET, "set dsa_indexer_loss_coeff to 0, leave --use-rollout-indexer-replay out, or set across_ranks to off: rows count by their own rank's microbatches, and choices are known there alone")
UNEVEN_MICROBATCHES = Refusal("global_aux_loss, and data-parallel ranks with … to … microbatches", "ranks", WRONG, "give all equally many, or use aux_loss", ends=True)
UNEVEN_SAMPLES = Refusal("seq_aux_loss with samples of several lengths in one microbatch", "ranks", NOT_YET, "pad them to one length, or use aux_loss")

# --- this package ---------------------------------------------------------------------------------

FEATURE_MISSING = Refusal("… cannot be imported (…)", "package", NOT_YET, "install megatron_prefix again: until then the stock schedule runs the steps that need it")
OWN_ERROR = Refusal("an internal error of the prefix schedule, in … (…)", "package", NOT_YET, "report it with the traceback in the log; modes auto and off run such steps with the stock schedule")
NO_MEMORY = Refusal("a step with segments does not fit in device memory (…)", "package", NOT_YET, "give fewer segment_tokens or chunk_tokens, or memory recompute: its kind is the stock schedule's from then on")
NO_COPY = Refusal("gradients are not zero when a call begins, and the host has no room for a copy (…)", "package", NOT_YET, "give one call all microbatches of an update, or free host memory: mode auto shares what it can undo")
OTHER_DRAWS = Refusal("a step that could not be shared has to run again, and its forward steps …", "package", NOT_YET, "give the schedule a data iterator that they draw all of a microbatch from, and do not write into that; or use mode off", ends=True)

# --- trainers -------------------------------------------------------------------------------------

RESET_MASK = Refusal("--reset-attention-mask", "Megatron-LM", NOT_YET, "its mask is not causal: pack documents instead")
DISTILLATION = Refusal("--export-kd-teacher-load", "Megatron-LM", NOT_YET, "leave it out: its loss reads hidden states of both models")
LEGACY_MODELS = Refusal("--use-legacy-models", "Megatron-LM", NOT_YET, "leave it out: only Megatron-Core's models run in segments")
OWN_CP_LOOP = Refusal("--hybrid-context-parallel", "Megatron-LM", NOT_YET, "leave it out: it has a training loop of its own")
PACKED_BINS_CP = Refusal("--context-parallel-size with packed bins", "Megatron-RL", NOT_YET, "leave context parallelism out: train_rl.py itself has none with packed bins")
BRIDGE_TEACHER = Refusal("a teacher beside the model (distill)", "Megatron-Bridge", NOT_YET, "leave it out: ModelOpt's model has a forward of its own, which runs both")
DYNAMIC_CP = Refusal("dynamic_context_parallel", "verl", NOT_YET, "turn it off: it passes a padding_mask")
MULTI_LORA = Refusal("--multi-lora-n-adapters", "miles", NOT_YET, "leave it out: its layers find each adapter's tokens by their places in a microbatch")
LORA_DROPOUT = Refusal("--lora_dropout above 0, its default", "ms-swift", WRONG, _DROPS)
SWIFT_METRICS = Refusal("several data-parallel ranks", "ms-swift", NOT_YET, "its losses average metrics over them in every microbatch: use tensor parallelism instead")
SKYRL_ROWS = Refusal("no remove_microbatch_padding, with pipeline stages", "SkyRL", NOT_YET, "set trainer.remove_microbatch_padding: the last stage's mask fits no tokens of its call")
RLINF_STAGES = Refusal("pipeline_model_parallel_size above 1", "RLinf", NOT_YET, "use tensor parallelism instead: its forward step divides what every stage returns by the temperature")
TREE_TRAINING = Refusal("tree training", "AReaL", NOT_YET, "turn it off: it shares prefixes already, with an attention of its own")
ROLL_MTP = Refusal("mtp_num_layers above 0", "ROLL", NOT_YET, "leave it out: its strategy replaces _postprocess in GPTModel, in every mtp_training_mode")

# fmt: on
TABLE: tuple[Refusal, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Refusal)
)
"""All of the above, in their order."""
OPTIONS: tuple[Refusal, ...] = tuple(refusal for refusal in TABLE if refusal.is_on is not None)
"""Those that a TransformerConfig alone shows."""
