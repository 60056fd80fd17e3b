"""[pure] ms-swift, with its Megatron trainers."""

from __future__ import annotations

from megatron_prefix.refusals.table import LORA_DROPOUT, SWIFT_METRICS
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="ms-swift",
    module="swift.megatron",
    package="ms-swift",
    tried=("3602360a5",),
    on="--external_plugins my_plugin.py, a file with `import megatron_prefix.auto.on_import`",
    loss="all: labels of -100 stay in the loss, so the output layer runs on prompts too, once each",
    together="nothing, but a pair of answers is one row of the data set, and so in one microbatch",
    refused=(LORA_DROPOUT, SWIFT_METRICS),
)
