"""Which backend reads this dataset here: found by decoding a frame, before training starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.video.backends import BACKENDS, open_file
from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import build_index

DEFAULT, FALLBACK = "torchcodec", "pyav"
_PACKAGES = {
    "torchcodec": "torchcodec",
    "pyav": "av",
    "decord": "decord",
    "opencv": "opencv-python-headless",
    "torchvision_av": "torchvision",
}


class Choice(NamedTuple):
    """The backend to use, the version of its package, and why this one (a phrase for the log)."""

    backend: str
    version: str
    reason: str

    @property
    def note(self) -> str:
        """The line for the run's log."""
        return f"video decoded by {self.backend} {self.version} ({self.reason})"


def choose_backend(asked: str | None, path: str) -> Choice:
    """Decodes the first frame of `path`.

    Args:
        asked: a backend's name, which is used or refused with UserError; None takes torchcodec, and PyAV
            where torchcodec does not work.
    """
    if asked is not None and asked not in BACKENDS:
        raise unknown("video backend", asked, BACKENDS)
    fault = _try(asked or DEFAULT, path)
    if fault is None:
        return Choice(asked or DEFAULT, _version(asked or DEFAULT), "asked for" if asked else "default")
    if asked is not None:
        raise UserError(f"The video backend '{asked}' does not work here: {fault}")
    second = _try(FALLBACK, path)
    if second is not None:
        raise UserError(f"No video backend works: {DEFAULT}: {fault} {FALLBACK}: {second}")
    return Choice(FALLBACK, _version(FALLBACK), f"{DEFAULT} does not work here: {fault}")


def _try(backend: str, path: str) -> str | None:
    """None when `backend` decodes the first frame of `path`, else what went wrong."""
    index = build_index(path)
    try:
        decoder = open_file(backend, path, index)
        decoder.frames([0])
        decoder.close()
    except DecodeError as error:
        return str(error)
    except ImportError as error:
        return f"{_first_line(error)} (pip install {_PACKAGES[backend]})."
    except Exception as error:  # a package that is there but broken: missing FFmpeg libraries, ABI mismatch
        return f"{type(error).__name__}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _version(backend: str) -> str:
    for package in (_PACKAGES[backend], "opencv-python", "eva-decord"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"
