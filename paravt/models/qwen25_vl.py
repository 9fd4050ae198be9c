"""Qwen2.5-VL: frames in multiples of 28 px, vision attention within windows of a frame in most layers, features of the
tower's end alone."""

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm, Qwen2_5_VLVisionAttention

from paravt.models.base import Family
from paravt.models.faster import BatchedVisionAttention, FusedRMSNorm


class VisionAttention(BatchedVisionAttention, Qwen2_5_VLVisionAttention):  # type: ignore[misc]
    pass


class RMSNorm(FusedRMSNorm, Qwen2_5_VLRMSNorm):  # type: ignore[misc]
    pass


FAMILY = Family(faster={Qwen2_5_VLVisionAttention: VisionAttention, Qwen2_5_VLRMSNorm: RMSNorm}, deepstack=False)
