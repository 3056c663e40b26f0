"""The two names that people have for a dtype."""

from __future__ import annotations

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LONG = {short: name for name, short in SHORT.items()}
OTHER = SHORT | LONG
