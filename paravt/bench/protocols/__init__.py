"""How other projects' models were trained to be asked and answered: one small file for each kind of protocol.

Built from public descriptions; the texts are our own (`paravt/prompts/modes`). Whoever needs the very words that a
checkpoint was trained with gives them as a file.
"""

from paravt.bench.protocols.conan import conan
from paravt.bench.protocols.plain import direct, video_r1
from paravt.bench.protocols.stops import StopAt
from paravt.bench.protocols.tool_use import longvt, qwen3_vl
from paravt.bench.protocols.videozoomer import videozoomer

__all__ = ["StopAt", "conan", "direct", "longvt", "qwen3_vl", "video_r1", "videozoomer"]
