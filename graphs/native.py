"""The loops of `kernels.native` for this process."""

from __future__ import annotations

import logging
from functools import cache

from vlaforge.data.statistics import cache_folder
from vlaforge.kernels.native import Native, NotBuilt, use

log = logging.getLogger("vlaforge.native")


@cache
def native() -> Native | None:
    """The loops, compiled at a machine's first call and from then on what the ops of `kernels` run on; None, with a
    warning, where they cannot be built."""
    try:
        built = Native(cache_folder() / "native")
    except (NotBuilt, OSError) as error:
        log.warning("AdamW, attention and convolutions run on torch, with more passes over memory: %s.", error)
        return None
    use(built)
    return built
