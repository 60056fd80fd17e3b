"""A small vision-language model that is its own language model, as ROLL's are.

Its class has the name of a real one, since that is how models are told; its tower is that of
vision.py."""

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel

from tests.harness import vision


class Model(GPTModel):
    """A tower inside a language model."""

    def __init__(self, _: str, config: Any, spec: Any, **options: Any) -> None:
        super().__init__(
            config, spec, position_embedding_type="mrope",
            scatter_embedding_sequence_parallel=False, **options,
        )  # fmt: skip
        self.model_type = ModelType.encoder_or_decoder
        if self.pre_process:
            self.vision_model = vision.Tower(config.hidden_size, 0, config.params_dtype)

    @property
    def language_model(self) -> Any:
        return self

    def forward(self, input_ids, position_ids, pixel_values=None, image_grid_thw=None, **named):
        """Samples and their images in; embeddings of this rank's rows to the parent's forward."""
        rows = None
        if self.pre_process:
            rows = self.embedding(input_ids=input_ids, position_ids=None).clone()
            if pixel_values is not None:
                seen, _ = self.vision_model(hidden_states=pixel_values, grid_thw=image_grid_thw)
                mask = (input_ids == vision.IMAGE)[..., None]
                rows = rows.transpose(0, 1).masked_scatter(mask, seen).transpose(0, 1).contiguous()
            if self.config.sequence_parallel:
                rows = tensor_parallel.scatter_to_sequence_parallel_region(rows)
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None,
            decoder_input=rows, **named,
        )  # fmt: skip


Model.__module__ = "mcore_adapter.models.qwen2_5_vl.modeling_qwen2_5_vl"
Model.__qualname__ = "Qwen2_5_VLModel"
Model.__name__ = Model.__qualname__
