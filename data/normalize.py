"""One library of normalisers, used by trainer and server alike, and stored in every checkpoint with its hash.

A `Normalizer` is an affine map per dimension (or a threshold) made from statistics that were taken *after*
the action transform. A `NormalizerSet` holds one for each (embodiment, key). Statistics are float64 arrays
[A], or [H, A] where each step of a chunk has its own (relative actions); values are float32 [..., A] or
[..., H, A].

Implementations differ in how they treat small ranges; `convention` selects one by name:

========== ======================================== =====================================
convention range (``min_max``, ``q99``)             std (``mean_std``)
========== ======================================== =====================================
vlaforge   constant → 0, and back to the constant   the same
openpi     d + 1e-6, both ways                      std + 1e-6, both ways
lerobot    d == 0 → 1e-8, both ways                 std + 1e-8 forward, std backward
========== ======================================== =====================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from vlaforge.data.errors import UserError, unknown

Statistics = Mapping[str, Mapping[str, np.ndarray]]
"""key (``action``, ``observation.state``) → name (mean, std, min, max, q01, q99, count) → array [A] or [H,
A].
"""

NEEDED: dict[str, tuple[str, ...]] = {
    "identity": (),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "q99": ("q01", "q99"),
    "scale": ("min", "max"),
    "binary": (),
}
"""Which statistics each mode reads."""

CONVENTIONS = ("vlaforge", "openpi", "lerobot")
CONSTANT = 1e-6
"""A spread below this share of the values' size (some ten float32 roundings) counts as constant."""

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Normalizer:
    """The map of one key: ``normalize`` to about [-1, 1] (or unit variance), ``denormalize`` back.

    Args:
        mode: a key of `NEEDED`.
        a, b: what the mode needs, float64 [A] or [H, A]: (q01, q99), (min, max) or (mean, std). None where
            it needs nothing.
        convention: how small ranges are treated, see the module's table.
        clip: normalised values are clipped to [-clip, clip], both when normalising and before the inverse.
        threshold: of ``binary``: 1 above it, else 0.
    """

    mode: str
    a: np.ndarray | None = None
    b: np.ndarray | None = None
    convention: str = "vlaforge"
    clip: float | None = None
    threshold: float = 0.5
    _map: tuple[np.ndarray, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if self.mode not in NEEDED:
            raise unknown("normalisation mode", self.mode, NEEDED)
        if self.convention not in CONVENTIONS:
            raise unknown("normalisation convention", self.convention, CONVENTIONS)
        if NEEDED[self.mode]:
            a, b = (np.asarray(value, np.float64) for value in (self.a, self.b))
            if a.shape != b.shape or a.ndim not in (1, 2):
                raise UserError(
                    f"Statistics for '{self.mode}' have shapes {a.shape} and {b.shape}; both must be [A] or [H, A]."
                )
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise UserError(f"Statistics for '{self.mode}' hold NaN or infinity; compute them again.")
            object.__setattr__(self, "a", a)
            object.__setattr__(self, "b", b)
            object.__setattr__(self, "_map", _affine(self.mode, a, b, self.convention))

    @classmethod
    def from_statistics(cls, mode: str, stats: Mapping[str, np.ndarray], key: str = "", **options) -> Normalizer:
        """Takes what `mode` needs out of one key's statistics. UserError when some are missing: there is no
        silent fallback from quantiles to min/max or mean/std, because that changes the scale."""
        if mode not in NEEDED:
            raise unknown("normalisation mode", mode, NEEDED)
        missing = [name for name in NEEDED[mode] if name not in stats]
        if missing:
            raise UserError(
                f"Normalisation '{mode}' of '{key}' needs the statistics {' and '.join(missing)}, which are "
                f"missing (there are {sorted(stats)}); compute them with `forge-data stats`."
            )
        return cls(mode, *(stats[name] for name in NEEDED[mode]), **options)

    @property
    def dim(self) -> int | None:
        """A, or None when the mode needs no statistics and takes any."""
        return None if self.a is None else self.a.shape[-1]

    @property
    def constant(self) -> np.ndarray:
        """bool [A] or [H, A]: dimensions that do not vary, so normalise to 0 (convention ``vlaforge``)."""
        return np.zeros(0, bool) if self.a is None else _constant(self.mode, self.a, self.b)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """x [..., A] or [..., H, A], any real dtype → float32 of the same shape. UserError on a wrong
        dimension.
        """
        x = np.asarray(x, np.float32)
        if self.mode == "binary":
            return (x > self.threshold).astype(np.float32)
        if self.mode == "identity":
            return x
        self._check(x)
        shift, scale, flat = self._map[:3]
        if self.mode == "scale":
            y = x / scale
        elif self.mode == "mean_std":
            y = (x - shift) / scale
        elif self.convention == "openpi":
            y = (x - shift) / scale * np.float32(2) - np.float32(1)
        else:
            y = np.float32(2) * (x - shift) / scale - np.float32(1)
        if self.convention == "vlaforge" and flat.any():
            y = np.where(flat, np.float32(0), y)
        return y if self.clip is None else np.clip(y, -self.clip, self.clip).astype(np.float32)

    def denormalize(self, y: np.ndarray) -> np.ndarray:
        """The inverse, float32; a constant dimension comes back as its constant. ``binary`` thresholds."""
        y = np.asarray(y, np.float32)
        if self.mode == "binary":
            return (y > self.threshold).astype(np.float32)
        if self.mode == "identity":
            return y
        self._check(y)
        if self.clip is not None:
            y = np.clip(y, -self.clip, self.clip)
        shift, _, flat, back, value = self._map
        if self.mode in ("scale", "mean_std"):
            x = y * back + shift
        else:
            x = (y + np.float32(1)) / np.float32(2) * back + shift
        return np.where(flat, value, x) if self.convention == "vlaforge" and flat.any() else x

    def _check(self, x: np.ndarray) -> None:
        if x.ndim < self.a.ndim or x.shape[-self.a.ndim :] != self.a.shape:
            names = "[..., A]" if self.a.ndim == 1 else "[..., H, A]"
            raise UserError(
                f"Statistics are for {names} = {list(self.a.shape)}, but the values have shape "
                f"{list(x.shape)}; these are statistics of another robot, horizon or action mode."
            )

    def to_dict(self) -> dict:
        out = {
            "mode": self.mode,
            "convention": self.convention,
            "clip": self.clip,
            "threshold": self.threshold,
        }
        for name in ("a", "b"):
            value = getattr(self, name)
            out[name] = None if value is None else value.tolist()
        return out

    @classmethod
    def from_dict(cls, raw: Mapping) -> Normalizer:
        known = {f.name for f in fields(cls) if f.init}
        if extra := set(raw) - known:
            raise UserError(f"A stored normaliser has unknown entries {sorted(extra)}; it was made by another version.")
        arrays = {n: None if raw.get(n) is None else np.asarray(raw[n], np.float64) for n in ("a", "b")}
        return cls(**{**raw, **arrays})


def _constant(mode: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if mode == "mean_std":
        return np.abs(b) <= CONSTANT * np.abs(a)
    size = np.maximum(np.abs(a), np.abs(b))
    return size == 0 if mode == "scale" else np.abs(b - a) <= CONSTANT * size


def _affine(mode: str, a: np.ndarray, b: np.ndarray, convention: str) -> tuple[np.ndarray, ...]:
    """float32 (shift, scale forward, constant dims, scale backward, their value), in the rounding of the
    originals.
    """
    flat = _constant(mode, a, b)
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    if mode == "mean_std":
        shift, spread, value = a32, b32, a32
    elif mode == "scale":
        shift, spread, value = np.zeros_like(a32), np.maximum(np.abs(a32), np.abs(b32)), np.zeros_like(a32)
    else:
        shift, spread, value = a32, b32 - a32, ((a + b) / 2).astype(np.float32)
    if convention == "openpi":
        scale = back = spread + np.float32(1e-6)
    elif convention == "lerobot" and mode == "mean_std":
        scale, back = spread + np.float32(1e-8), spread
    elif convention == "lerobot":
        scale = back = np.where(spread == 0, np.float32(1e-8), spread)
    else:
        scale = back = np.where(flat, np.float32(1), spread)
    return shift, scale, flat, back, value


class NormalizerSet:
    """The normalisers of a run: by key, and by embodiment where several robots are mixed.

    ``entries[embodiment][key]``; the embodiment ``""`` serves those that have no entry of their own. The
    object is immutable by convention, picklable, and equal content gives an equal `hash`.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Normalizer]]):
        self.entries = {name: dict(keys) for name, keys in entries.items()}

    @classmethod
    def single(cls, **keys: Normalizer) -> NormalizerSet:
        """For one robot: ``NormalizerSet.single(action=..., state=...)``."""
        return cls({"": keys})

    @classmethod
    def from_statistics(
        cls, stats: Statistics, modes: Mapping[str, str], names: Mapping[str, str] | None = None, **options
    ) -> NormalizerSet:
        """One robot's set. `modes` maps our key (``action``, ``state``) to a mode, `names` our key to the
        key in `stats` where they differ (default: ``state`` → ``observation.state``). `options` go to each
        Normalizer.
        """
        names = {"state": "observation.state", **(names or {})}
        made = {}
        for key, mode in modes.items():
            source = names.get(key, key)
            if source not in stats and NEEDED.get(mode, ("?",)):
                raise UserError(f"There are no statistics for '{source}' (there are {sorted(stats)}).")
            made[key] = Normalizer.from_statistics(mode, stats.get(source, {}), source, **options)
        return cls({"": made})

    def get(self, key: str, embodiment: str = "") -> Normalizer:
        keys = self.entries.get(embodiment) or self.entries.get("") or {}
        if key not in keys:
            held = {name or "(any)": sorted(have) for name, have in self.entries.items()}
            raise UserError(
                f"There is no normaliser for '{key}' of embodiment '{embodiment or '(any)'}'; held: {held}."
            )
        return keys[key]

    def __contains__(self, key: str) -> bool:
        return any(key in keys for keys in self.entries.values())

    def __iter__(self) -> Iterator[tuple[str, str, Normalizer]]:
        """(embodiment, key, normaliser), sorted."""
        for name in sorted(self.entries):
            for key in sorted(self.entries[name]):
                yield name, key, self.entries[name][key]

    def normalize(self, key: str, x: np.ndarray, embodiment: str = "") -> np.ndarray:
        return self.get(key, embodiment).normalize(x)

    def denormalize(self, key: str, y: np.ndarray, embodiment: str = "") -> np.ndarray:
        return self.get(key, embodiment).denormalize(y)

    def merged(self, other: NormalizerSet, embodiment: str) -> NormalizerSet:
        """This set plus the single-robot set `other` under the name `embodiment` (mixtures)."""
        if embodiment in self.entries:
            raise UserError(
                f"Two datasets of the mixture are called '{embodiment}'; give each its own embodiment name."
            )
        return NormalizerSet({**self.entries, embodiment: other.entries.get("", {})})

    def to_json(self) -> str:
        """Canonical text (sorted keys, exact float64): the same content always gives the same text."""
        body = {name: {k: n.to_dict() for k, n in keys.items()} for name, keys in self.entries.items()}
        return json.dumps({"format": FORMAT, "normalizers": body}, sort_keys=True, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> NormalizerSet:
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise UserError(f"Stored normalisers have format {raw['format']}; this version reads {FORMAT}.")
            body = raw["normalizers"]
            return cls({n: {k: Normalizer.from_dict(v) for k, v in keys.items()} for n, keys in body.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"The stored normalisers cannot be read ({error!r}); the file is damaged.") from error

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> NormalizerSet:
        path = Path(path)
        if not path.is_file():
            raise UserError(f"There is no normaliser file '{path}'.")
        return cls.from_json(path.read_text())

    @property
    def hash(self) -> str:
        """16 hex digits of the content; trainer, checkpoint and server compare it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def with_options(self, **options) -> NormalizerSet:
        """The same statistics under another convention or clip."""
        return NormalizerSet(
            {name: {k: replace(n, **options) for k, n in keys.items()} for name, keys in self.entries.items()}
        )
