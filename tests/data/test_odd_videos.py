"""Videos as cameras and cutting tools leave them: with every backend the right frame, or an error in place of it."""

from __future__ import annotations

import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from vlaforge.data.convert.video import JoinedVideo
from vlaforge.data.errors import UserError
from vlaforge.data.video import BACKENDS, DecodeError, Expected, VideoPool, build_index, choose_backend

COUNT = 30


def turn(path, degrees):
    """Writes a display matrix into an mp4's track header: shown turned counter-clockwise by `degrees`."""
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    one = 1 << 16
    matrix = struct.pack(">9i", cos * one, -sin * one, 0, sin * one, cos * one, 0, 0, 0, 1 << 30)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    data[at : at + len(matrix)] = matrix
    path.write_bytes(bytes(data))


def cut_front(source, path, frames):
    """What `ffmpeg -ss -c copy` makes: starts at a key frame, and an edit list hides what comes before the cut."""
    with av.open(str(source)) as container, av.open(str(path), "w") as output:
        stream = container.streams.video[0]
        copy = output.add_stream_from_template(stream, opaque=True)
        shift = int(Fraction(frames, 30) / stream.time_base)
        for packet in container.demux(stream):
            if packet.dts is not None:
                packet.stream, packet.pts, packet.dts = copy, packet.pts - shift, packet.dts - shift
                output.mux(packet)


def with_sound(path, numbers):
    with av.open(str(path), "w") as output:
        video, sound = output.add_stream("libx264", rate=30), output.add_stream("aac", rate=48000)
        video.width = video.height = 64
        for number in range(COUNT):
            output.mux(video.encode(av.VideoFrame.from_ndarray(numbers.draw(number), format="rgb24")))
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1600), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 48000, number * 1600
            output.mux(sound.encode(silence))
        output.mux([*video.encode(None), *sound.encode(None)])


def write(path, numbers, name):
    """Makes the case `name`; returns the number that each of its frames shows."""
    count = range(COUNT)
    open_gop = "open-gop=1:keyint=10:min-keyint=10:bframes=3:b-adapt=0:scenecut=0"
    if name == "open groups":
        numbers.write(path, count, **{"x264-params": open_gop})
    elif name == "10 bits":
        numbers.write(path, count, pix_fmt="yuv420p10le")
    elif name == "late start":
        numbers.write(path, count, times=[number + 2 for number in count], container={"use_editlist": "0"})
    elif name == "uneven":
        jitter = np.random.default_rng(0).uniform(-0.3, 0.3, COUNT)
        numbers.write(path, count, times=(np.arange(COUNT) * 20 + 20 * jitter.clip(0)).astype(int).tolist(), fps=600)
    elif name == "fragments":
        numbers.write(path, count, container={"movflags": "frag_keyframe+empty_moov"})
    elif name == "one frame":
        numbers.write(path, [7])
        return [7]
    elif name == "sound":
        with_sound(path, numbers)
    elif name == "cut":
        numbers.write(path.with_name("whole.mp4"), count)
        cut_front(path.with_name("whole.mp4"), path, 17)
        return list(count[17:])
    elif name == "cut, no reordering":
        numbers.write(path.with_name("whole.mp4"), count, codec="mpeg4", bf="0")
        cut_front(path.with_name("whole.mp4"), path, 17)
        return list(count[17:])
    else:
        numbers.write(path, count, codec=name)
    return list(count)


CASES = (
    *("open groups", "10 bits", "late start", "uneven", "fragments", "one frame", "sound", "cut"),
    *("cut, no reordering", "mpeg4", "libx265"),
)


@pytest.mark.parametrize("name", CASES)
def test_the_right_frame_or_an_error(tmp_path, numbers, name):
    """Frames asked for one by one in random order, so that every one is reached by a seek; PyAV finds all."""
    path = tmp_path / "odd.mp4"
    shows = write(path, numbers, name)
    assert build_index(str(path)).count == len(shows)
    right = {}
    for backend in BACKENDS:
        try:
            choose_backend(backend, str(path))
        except UserError:
            continue  # not installed here, or it says that it cannot read this file
        pool, right[backend] = VideoPool(backend, 30), 0
        for row in np.random.default_rng(1).permutation(len(shows)).tolist():
            try:
                frame = pool.frames(str(path), [row], Expected(len(shows), len(shows)))[0]
            except DecodeError as error:
                assert "odd.mp4" in str(error) and backend in str(error)
                continue
            assert numbers.read(frame) == shows[row], (backend, row)
            right[backend] += 1
    assert right["pyav"] == right["torchcodec"] == len(shows), right
    assert right.get("opencv", 0) == len(shows) or name == "late start", right


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_turned_videos_are_turned_by_every_backend(tmp_path, degrees):
    path = tmp_path / "turned.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=30, options={"crf": "10"})
        stream.width, stream.height = 96, 64
        picture = np.zeros((64, 96, 3), np.uint8)
        picture[:32, :48], picture[32:, :48] = 255, 120
        output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    turn(path, degrees)
    expected = np.rot90(picture, degrees // 90)
    for backend in ("pyav", "torchcodec", "opencv"):
        frame = VideoPool(backend, 30).frames(str(path), [0], Expected(1, 1))[0]
        assert frame.shape == expected.shape and np.abs(frame.astype(int) - expected).mean() < 3, backend


def test_packets_of_cut_or_turned_videos_are_not_joined(tmp_path, numbers):
    path = tmp_path / "odd.mp4"
    shows = write(path, numbers, "cut")
    with pytest.raises(UserError, match=r"odd\.mp4 hides \d+ frames"):
        JoinedVideo(tmp_path / "joined.mp4", 30).append(path, len(shows))
    numbers.write(path, range(COUNT))
    turn(path, 90)
    with pytest.raises(UserError, match=r"odd\.mp4 is shown turned"):
        JoinedVideo(tmp_path / "joined.mp4", 30).append(path, COUNT)
