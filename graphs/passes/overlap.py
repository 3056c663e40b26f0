"""overlap: the next batch travels to the device, and frozen encoders read it, while this step runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.graphs.overlap import Prefetcher, frozen_encoders
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, StepParts


class Overlap(Pass):
    name = "overlap"
    stage = "step"
    numerics = "exact"
    order = 110

    def decide(self, model: nn.Module, context: Context) -> Decision:
        encoders = frozen_encoders(model, context)
        frozen = ", frozen encoders" if encoders else ""
        if not context.options.device_kind.cuda:
            return Decision(True, f"next batch{frozen}: one path for all devices, without streams on a CPU")
        return Decision(True, f"next batch: pinned copy{frozen} on a side stream, behind the running step")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [Site("loader", "copy"), *(Site(name, "encoder") for name in frozen_encoders(model, context))]

    def apply(self, target: StepParts, sites: Sequence[Site], context: Context) -> None:
        encoders = [site.path for site in sites if site.what == "encoder"]
        target.loader = Prefetcher(target.loader, target.device, target.model, encoders)
