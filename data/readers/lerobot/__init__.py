"""LeRobot v2.0, v2.1 and v3.0: one reader, and a layout for each version that says where things are.

layouts.py   version → episode table, tasks, statistics      features.py  info.json → cameras and columns
rows.py      parquet → numpy, episode by episode             images.py    pictures stored inside parquet
reader.py    the Dataset                                     stored.py    the statistics a dataset carries
"""

from vlaforge.data.readers.lerobot.layouts import VERSIONS, detect, open_layout
from vlaforge.data.readers.lerobot.reader import LeRobotReader

__all__ = ["VERSIONS", "LeRobotReader", "detect", "open_layout"]
