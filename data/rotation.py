"""Rotations between the representations that datasets and policies use, and rigid poses.

All functions take float arrays with any leading axes and compute in float64. Names:

============== ==== ================================================================================
matrix         9    rotation matrix, row-major
quaternion     4    (x, y, z, w), unit; the one with w >= 0 is returned
quaternion_wxyz 4   (w, x, y, z)
euler          3    angles about fixed x, then y, then z: R = Rz · Ry · Rx; radians
axis_angle     3    unit axis times angle in [0, π]
rot6d          6    first two columns of the matrix, one after the other
rot6d_rows     6    first two rows, one after the other
rot6d_pairs    6    first two columns, interleaved row by row: r00 r01 r10 r11 r20 r21
============== ==== ================================================================================

The six-number forms are made orthonormal by Gram-Schmidt when read (Zhou et al., arXiv 1812.07035).
"""

from __future__ import annotations

import numpy as np

from vlaforge.data.errors import UserError, unknown

SIZES = {
    "matrix": 9,
    "quaternion": 4,
    "quaternion_wxyz": 4,
    "euler": 3,
    "axis_angle": 3,
    "rot6d": 6,
    "rot6d_rows": 6,
    "rot6d_pairs": 6,
}


def convert(x: np.ndarray, source: str, target: str) -> np.ndarray:
    """[..., n of source] → [..., n of target], float64. UserError: unknown name, or wrong last axis."""
    return x.astype(np.float64) if source == target else from_matrix(to_matrix(x, source), target)


def to_matrix(x: np.ndarray, source: str) -> np.ndarray:
    """[..., n] in representation `source` → rotation matrices [..., 3, 3]."""
    x = np.asarray(x, np.float64)
    if source not in SIZES:
        raise unknown("rotation", source, SIZES)
    if x.shape[-1] != SIZES[source]:
        raise UserError(f"A rotation as {source} has {SIZES[source]} numbers, not {x.shape[-1]}.")
    if source == "matrix":
        return x.reshape(*x.shape[:-1], 3, 3)
    if source == "euler":
        return _from_euler(x)
    if source == "axis_angle":
        return _from_quaternion(_axis_angle_to_quaternion(x))
    if source.startswith("rot6d"):
        return _from_rot6d(x, source)
    return _from_quaternion(np.roll(x, -1, -1) if source == "quaternion_wxyz" else x)


def from_matrix(matrix: np.ndarray, target: str) -> np.ndarray:
    """Rotation matrices [..., 3, 3] → [..., n] in representation `target`."""
    if target not in SIZES:
        raise unknown("rotation", target, SIZES)
    lead = matrix.shape[:-2]
    if target == "matrix":
        return matrix.reshape(*lead, 9)
    if target == "rot6d":
        return np.swapaxes(matrix[..., :2], -1, -2).reshape(*lead, 6)
    if target == "rot6d_rows":
        return matrix[..., :2, :].reshape(*lead, 6)
    if target == "rot6d_pairs":
        return matrix[..., :2].reshape(*lead, 6)
    if target == "euler":
        return _to_euler(matrix)
    quaternion = _to_quaternion(matrix)
    if target == "quaternion_wxyz":
        return np.roll(quaternion, 1, -1)
    return quaternion if target == "quaternion" else _quaternion_to_axis_angle(quaternion)


def _from_rot6d(x: np.ndarray, layout: str) -> np.ndarray:
    if layout == "rot6d_pairs":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :3], x[..., 3:]
    first = _unit(first)
    second = _unit(second - (first * second).sum(-1, keepdims=True) * first)
    axis = -2 if layout == "rot6d_rows" else -1
    return np.stack([first, second, np.cross(first, second)], axis)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _from_quaternion(q: np.ndarray) -> np.ndarray:
    x, y, z, w = np.moveaxis(_unit(q), -1, 0)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, -1) for row in rows], -2)


def _to_quaternion(m: np.ndarray) -> np.ndarray:
    """The largest component comes from the diagonal, and the others from it without cancellation."""
    xx, yy, zz = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    squares = np.stack([1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz, 1 + xx + yy + zz], -1)
    xy, xz, yz = m[..., 0, 1] + m[..., 1, 0], m[..., 0, 2] + m[..., 2, 0], m[..., 1, 2] + m[..., 2, 1]
    wx, wy, wz = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]
    candidates = np.stack(
        [
            np.stack([squares[..., 0], xy, xz, wx], -1),
            np.stack([xy, squares[..., 1], yz, wy], -1),
            np.stack([xz, yz, squares[..., 2], wz], -1),
            np.stack([wx, wy, wz, squares[..., 3]], -1),
        ],
        -2,
    )
    best = squares.argmax(-1)[..., None, None]
    q = _unit(np.take_along_axis(candidates, best, -2)[..., 0, :])
    return np.where(q[..., 3:] < 0, -q, q)


def _axis_angle_to_quaternion(x: np.ndarray) -> np.ndarray:
    angle = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.concatenate([x * (0.5 * np.sinc(angle / (2 * np.pi))), np.cos(angle / 2)], -1)


def _quaternion_to_axis_angle(q: np.ndarray) -> np.ndarray:
    sine = np.linalg.norm(q[..., :3], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(sine, q[..., 3:])
    small = sine < 1e-12
    return q[..., :3] * np.where(small, 2.0, angle / np.where(small, 1.0, sine))


def _from_euler(x: np.ndarray) -> np.ndarray:
    (a, b, c), (sa, sb, sc) = np.moveaxis(np.cos(x), -1, 0), np.moveaxis(np.sin(x), -1, 0)
    rows = (
        (b * c, sa * sb * c - a * sc, a * sb * c + sa * sc),
        (b * sc, sa * sb * sc + a * c, a * sb * sc - sa * c),
        (-sb, sa * b, a * b),
    )
    return np.stack([np.stack(row, -1) for row in rows], -2)


def _to_euler(m: np.ndarray) -> np.ndarray:
    """At gimbal lock (pitch ±90°) only x ∓ z is determined; z is set to 0 there."""
    cos_y = np.hypot(m[..., 0, 0], m[..., 1, 0])
    locked = cos_y < 1e-9
    x = np.where(locked, np.arctan2(-m[..., 1, 2], m[..., 1, 1]), np.arctan2(m[..., 2, 1], m[..., 2, 2]))
    z = np.where(locked, 0.0, np.arctan2(m[..., 1, 0], m[..., 0, 0]))
    return np.stack([x, np.arctan2(-m[..., 2, 0], cos_y), z], -1)


def relative_pose(pose: np.ndarray, reference: np.ndarray, rotation: str) -> np.ndarray:
    """`pose` as seen from `reference`, both [..., 3 + n] (position, rotation): the SE(3) product reference⁻¹
    · pose.
    """
    turn, ref_turn = to_matrix(pose[..., 3:], rotation), to_matrix(reference[..., 3:], rotation)
    back = np.swapaxes(ref_turn, -1, -2)
    position = (back @ (pose[..., :3] - reference[..., :3])[..., None])[..., 0]
    return np.concatenate([position, from_matrix(back @ turn, rotation)], -1)


def absolute_pose(pose: np.ndarray, reference: np.ndarray, rotation: str) -> np.ndarray:
    """The inverse of `relative_pose`: reference · pose."""
    turn, ref_turn = to_matrix(pose[..., 3:], rotation), to_matrix(reference[..., 3:], rotation)
    position = (ref_turn @ np.asarray(pose[..., :3], np.float64)[..., None])[..., 0] + reference[..., :3]
    return np.concatenate([position, from_matrix(ref_turn @ turn, rotation)], -1)
