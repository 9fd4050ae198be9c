"""How other projects' models were trained to be asked and answered: one small file for each kind of protocol.

Built from public descriptions; the texts are our own (`paravt/prompts/modes`). Whoever needs the very words that a
checkpoint was trained with gives them as a file.
"""

from paravt.bench.protocols.conan import CONAN
from paravt.bench.protocols.qwen import DIRECT, LONGVT, QWEN3_VL, VIDEO_R1
from paravt.bench.protocols.stops import StopAt
from paravt.bench.protocols.videozoomer import VIDEOZOOMER

__all__ = ["CONAN", "DIRECT", "LONGVT", "QWEN3_VL", "VIDEOZOOMER", "VIDEO_R1", "StopAt"]
