"""Video: the right frame by number with every backend, and an error in place of any other frame."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction

import av
import numpy as np
import pytest

from vlaforge.data.errors import UserError
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import DataNeeds
from vlaforge.data.video import BACKENDS, DecodeError, Expected, VideoPool, build_index, choose_backend
from vlaforge.data.video import probe as probing

KEY = "observation.images.front"


def usable(path) -> list[str]:
    """The backends that are installed here and decode `path`."""
    found = []
    for backend in BACKENDS:
        try:
            found.append(choose_backend(backend, str(path)).backend)
        except UserError:
            continue
    return found


def read_all(backend, path, count, order):
    pool = VideoPool(backend, 30)
    return [pool.frames(str(path), [row], Expected(count, count))[0] for row in order]


@pytest.mark.parametrize(
    "options", [{"g": "12", "bf": "3"}, {"g": "1", "bf": "0"}, {"g": "2", "bf": "1"}, {"g": "250"}]
)
def test_every_backend_finds_every_frame(tmp_path, numbers, options):
    """Key frames near and far, with frames that are stored in another order than they are shown."""
    path = tmp_path / "numbered.mp4"
    numbers.write(path, range(40), **options)
    order = np.random.default_rng(0).permutation(40).tolist()
    backends = usable(path)
    assert {"pyav", "torchcodec", "opencv"} <= set(backends)
    pictures = {}
    for backend in backends:
        pictures[backend] = read_all(backend, path, 40, order)
        assert [numbers.read(picture) for picture in pictures[backend]] == order, backend
    for backend, frames in pictures.items():
        off = np.abs(np.stack(frames).astype(int) - np.stack(pictures["pyav"]))
        assert off.max() <= 6 and off.mean() <= 1, backend


def test_frames_of_a_call_come_in_the_order_asked(tmp_path, numbers):
    path = tmp_path / "numbered.mp4"
    numbers.write(path, range(30))
    for backend in usable(path):
        pool = VideoPool(backend, 30)
        asked = [29, 3, 3, 0, 17, 18, 16]
        frames = pool.frames(str(path), asked, Expected(30, 30))
        assert [numbers.read(frame) for frame in frames] == asked
        assert frames.dtype == np.uint8 and frames.shape == (7, 64, 64, 3)


def test_backends_agree_on_real_videos(v21, metaworld):
    for dataset, least in ((v21, {"pyav", "torchcodec", "opencv"}), (metaworld, {"pyav", "torchcodec"})):
        path = next(iter(sorted(dataset.rglob("*.mp4"))))
        backends, count = usable(path), build_index(str(path)).count
        assert least <= set(backends)
        order = [0, count - 1, 5, 4, count // 2]
        frames = {name: np.stack(read_all(name, path, count, order)).astype(int) for name in backends}
        for name, got in frames.items():
            off = np.abs(got - frames["pyav"])
            assert off.max() <= 6 and off.mean() <= 1, name


def test_index_without_reading_equals_the_packets(metaworld):
    """AV1 is shown in the order it is stored, so the container's table gives what the packets would."""
    path = next(iter(sorted(metaworld.rglob("*.mp4"))))
    index = build_index(str(path))
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(container.streams.video[0]) if packet.size]
    assert index.count == len(packets) == 453 and index.codec == "av1"
    assert [index.pts_at(n) for n in range(453)] == [packet.pts for packet in packets]
    assert index.keys.tolist() == [n for n, packet in enumerate(packets) if packet.is_keyframe]


# ---------------------------------------------------------------------------------------------------- odd timing


def test_frames_dropped_at_capture(tmp_path, numbers):
    """As many frames as rows, twenty missing from the clock: row n is frame n, as a decode from the start gives it."""
    path, times = tmp_path / "gap.mp4", [*range(100), *range(120, 160)]
    numbers.write(path, times, times=times)
    assert build_index(str(path)).step == 0
    for backend in usable(path):
        got = read_all(backend, path, 140, [139, 0, 99, 100, 101, 60])
        assert [numbers.read(frame) for frame in got] == [159, 0, 99, 120, 121, 60], backend


def test_rows_without_a_frame_are_an_error(tmp_path, numbers):
    """More rows than frames, timing with a gap: rows are found by time, and those in the gap are not there."""
    path, times = tmp_path / "gap.mp4", [*range(100), *range(120, 160)]
    numbers.write(path, times, times=times)
    pool = VideoPool("pyav", 30)
    frames = pool.frames(str(path), [0, 99, 120, 159], Expected(160, 160))
    assert [numbers.read(frame) for frame in frames] == [0, 99, 120, 159]
    with pytest.raises(DecodeError, match=r"gap\.mp4 shows no frame at 3\.6667 s: the nearest"):
        pool.frames(str(path), [110], Expected(160, 160))


@pytest.mark.parametrize("fps", [30.0, float(np.float32(30.0)), 30])
def test_half_a_frame_away_is_still_near(tmp_path, numbers, fps):
    """A video at 20 a second for rows at 30: rows 1 and 2 lie exactly half a row from frame 1, and get it."""
    path = tmp_path / "rate.mp4"
    numbers.write(path, range(20), fps=20)
    pool = VideoPool("pyav", fps)
    got = pool.frames(str(path), [0, 1, 2, 3, 4, 5, 6, 27], Expected(30, 30))
    assert [numbers.read(frame) for frame in got] == [0, 1, 1, 2, 3, 3, 4, 18]
    numbers.write(path, range(19), fps=20)
    with pytest.raises(DecodeError, match=r"shows no frame at 0\.9667 s"):
        VideoPool("pyav", fps).frames(str(path), [29], Expected(30, 30))


def test_a_file_that_starts_late(tmp_path, numbers):
    """The first frame is row 0, whatever the container's clock says then."""
    path = tmp_path / "late.mp4"
    numbers.write(path, range(20), times=range(45, 65), bf="0")
    index = build_index(str(path))
    for backend in usable(path):
        got = read_all(backend, path, 20, [0, 19, 7])
        assert [numbers.read(frame) for frame in got] == [0, 19, 7], (backend, index.first)


# ---------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("backend", ["pyav", "torchcodec", "opencv"])
def test_a_cut_file_is_an_error_and_never_a_picture(tmp_path, numbers, backend):
    """The table says 60 frames, the bytes end earlier. What is asked for is not given from what is left."""
    whole, path = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    numbers.write(whole, range(60), g="5", movflags="")
    with (
        av.open(str(whole)) as source,
        av.open(str(tmp_path / "fast.mp4"), "w", options={"movflags": "faststart"}) as out,
    ):
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    data = (tmp_path / "fast.mp4").read_bytes()
    path.write_bytes(data[: int(len(data) * 0.7)])
    count = build_index(str(path)).count
    assert 20 < count < 60
    pool = VideoPool(backend, 30)
    with pytest.raises(DecodeError, match=rf"cut\.mp4 has {count} frames .*episodes need 60"):
        pool.frames(str(path), [0], Expected(60, 60))
    try:  # what is there may be read when that is all that is asked for; anything else is an error
        frame = pool.frames(str(path), [count - 3], Expected(count, count))[0]
        assert numbers.read(frame) == count - 3
    except DecodeError as error:
        assert "cut.mp4" in str(error) and backend in str(error)


def spoil(path, number, share=1.0):
    """Zeros the last `share` of the bytes of packet `number`."""
    with av.open(str(path)) as container:
        entry = container.streams.video[0].index_entries[number]
        end, size = entry.pos + entry.size, int(entry.size * share)
    data = bytearray(path.read_bytes())
    data[end - size : end] = bytes(size)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("backend", ["pyav", "torchcodec"])
def test_damaged_bytes_name_file_time_and_backend(metaworld, tmp_path, backend):
    path = tmp_path / "broken.mp4"
    shutil.copy(next(iter(sorted(metaworld.rglob("*.mp4")))), path)
    spoil(path, 200)
    pool = VideoPool(backend, 80)
    with pytest.raises(DecodeError, match=rf"frame 200 \(2\.5000 s\) of .*broken\.mp4 with {backend}"):
        pool.frames(str(path), [200], Expected(453, 453))
    assert pool.frames(str(path), [10], Expected(453, 453)).shape == (1, 128, 128, 3)


def test_a_concealed_picture_is_not_handed_out(v21, tmp_path):
    """H.264 decoders fill damage in from the frame before; PyAV tells, and then it is an error."""
    path = tmp_path / "broken.mp4"
    shutil.copy(next(iter(sorted(v21.rglob("*.mp4")))), path)
    spoil(path, 40, share=0.5)
    with pytest.raises(DecodeError, match="marks the frame as damaged"):
        VideoPool("pyav", 80).frames(str(path), [40], Expected(91, 91))


def test_what_is_no_video(tmp_path):
    with pytest.raises(DecodeError, match="is missing"):
        build_index(str(tmp_path / "none.mp4"))
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(DecodeError, match="cannot be opened as a video"):
        build_index(str(tmp_path / "text.mp4"))
    assert issubclass(DecodeError, UserError)
    error = pickle.loads(pickle.dumps(DecodeError.of("f", 3, 0.1, "pyav", "cause")))
    assert str(error) == "Cannot decode frame 3 (0.1000 s) of f with pyav: cause"


# ---------------------------------------------------------------------------------------------------- choice


def test_the_default_falls_back_and_says_so(metaworld, monkeypatch):
    path = str(next(iter(sorted(metaworld.rglob("*.mp4")))))
    real = probing.open_file

    def broken(backend, *arguments):
        if backend == "torchcodec":
            raise RuntimeError("Could not load libtorchcodec.\nlibavutil.so.59: cannot open shared object file")
        return real(backend, *arguments)

    monkeypatch.setattr(probing, "open_file", broken)
    choice = choose_backend(None, path)
    assert choice.backend == "pyav" and choice.version == av.__version__
    assert "torchcodec does not work here: RuntimeError: Could not load libtorchcodec." in choice.note
    with pytest.raises(UserError, match="'torchcodec' does not work here"):
        choose_backend("torchcodec", path)
    assert choose_backend("pyav", path).reason == "asked for"
    with pytest.raises(UserError, match="Unknown video backend 'pyva': did you mean 'pyav'"):
        choose_backend("pyva", path)


def test_a_missing_package_is_named(metaworld, monkeypatch):
    path = str(next(iter(sorted(metaworld.rglob("*.mp4")))))
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(UserError, match=r"'decord' does not work here: .*pip install decord"):
        choose_backend("decord", path)


# ---------------------------------------------------------------------------------------------------- processes


def _child(dataset, positions, queue):
    frames = [sample["observation.images.scene"] for sample in dataset.get_many(positions, DataNeeds())]
    queue.put(np.stack(frames))


def test_forked_workers_do_not_share_the_parents_files(metaworld):
    """The parent has decoded before its children start, and goes on while they do."""
    dataset, positions = open_dataset(metaworld), list(range(0, 450, 45))
    expected = np.stack([dataset.get(n, DataNeeds())["observation.images.scene"] for n in positions])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_child, args=(dataset, positions, queue)) for _ in range(3)]
    for child in children:
        child.start()
    again = np.stack([dataset.get(n, DataNeeds())["observation.images.scene"] for n in positions])
    answers = [queue.get(timeout=300) for _ in children]
    for child in children:
        child.join(300)
        assert child.exitcode == 0
    for answer in [again, *answers]:
        np.testing.assert_array_equal(answer, expected)


def test_spawned_workers_get_a_dataset_without_open_files(metaworld):
    dataset = open_dataset(metaworld)
    expected = dataset.get_many([7, 400], DataNeeds())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        answers = pool.submit(dataset.get_many, [7, 400], DataNeeds()).result(60)
    for got, sample in zip(answers, expected):
        for key, value in sample.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)


def test_only_so_many_files_stay_open(tiny, numbers):
    root = tiny([3, 3, 3, 3], video_mb=0.00001)
    dataset = open_dataset(root, open_videos=2)
    for position in (0, 3, 6, 9, 0, 11, 4):
        assert numbers.read(dataset.get(position, DataNeeds())[KEY]) == position
        assert len(dataset._pool._open) <= 2
    assert len(os.listdir("/proc/self/fd")) < 200 if os.path.isdir("/proc/self/fd") else True


def test_importing_the_readers_needs_no_optional_decoder():
    code = (
        "import sys\nfor name in ('torchcodec', 'cv2', 'decord', 'torchvision'): sys.modules[name] = None\n"
        "import vlaforge.data.readers, vlaforge.data.check, vlaforge.data.convert\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_rate_that_is_no_whole_number(tmp_path, numbers):
    """29.97 frames a second over enough frames that a rate of 30 would be off by one."""
    path, rate = tmp_path / "ntsc.mp4", Fraction(30000, 1001)
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=rate, options={"crf": "30", "g": "50", "preset": "ultrafast"})
        stream.width = stream.height = 64
        for number in range(1200):
            frame = av.VideoFrame.from_ndarray(numbers.draw(number), format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    pool = VideoPool("pyav", float(rate))
    got = pool.frames(str(path), [0, 599, 1100, 1199], Expected(1100, 1200))
    assert [numbers.read(frame) for frame in got] == [0, 599, 1100, 1199]
