"""What differs between model families: loading, frame sizes, rope positions, pixel inputs."""

from paravt.models.qwen_vl import QwenVL, load_model, merge_adapters

__all__ = ["QwenVL", "load_model", "merge_adapters"]
