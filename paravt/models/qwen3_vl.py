"""Qwen3-VL: frames in multiples of 32 px, whole-frame vision attention, deepstack features."""

from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm, Qwen3VLVisionAttention

from paravt.models.base import Family
from paravt.models.faster import BatchedVisionAttention, FusedRMSNorm


class VisionAttention(BatchedVisionAttention, Qwen3VLVisionAttention):  # type: ignore[misc]
    pass


class RMSNorm(FusedRMSNorm, Qwen3VLTextRMSNorm):  # type: ignore[misc]
    pass


FAMILY = Family(faster={Qwen3VLVisionAttention: VisionAttention, Qwen3VLTextRMSNorm: RMSNorm}, deepstack=True)
