"""Video frames by integer position, the same with every backend.

pool.py    open files of one process        index.py   frames and key frames of a file
probe.py   which backend works here         backends/  one file a decoder
"""

from vlaforge.data.video.backends import BACKENDS
from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import Expected, FrameIndex, build_index
from vlaforge.data.video.pool import VideoPool
from vlaforge.data.video.probe import Choice, choose_backend

__all__ = ["BACKENDS", "Choice", "DecodeError", "Expected", "FrameIndex", "VideoPool", "build_index", "choose_backend"]
