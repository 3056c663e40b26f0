"""Checkpoints: `files` (whole folders or none), `tensors` and `formats` (what is in them), `weights` (into
and out of models), `store` (the checkpoints of a run)."""
