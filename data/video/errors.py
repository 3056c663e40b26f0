"""The one error of the decoders: it names the file, the frame, its time and the backend."""

from __future__ import annotations

from vlaforge.data.errors import UserError


class DecodeError(UserError):
    """A frame could not be had. There is never a substitute picture: no black frame, no neighbour."""

    @classmethod
    def of(cls, path: str, position: int, time_s: float, backend: str, cause: object) -> DecodeError:
        """For frame number `position` of the file, shown `time_s` seconds after its first frame."""
        return cls(f"Cannot decode frame {position} ({time_s:.4f} s) of {path} with {backend}: {cause}")
