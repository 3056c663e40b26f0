"""Planning and lowering: which passes apply to a model, said in a plan that a person can read, then done.

plan = make_plan(model, contract, options)      nothing is changed; works on the meta device
print(plan.text())
plan.lower(model)                               module stage, in place, before the wrap
parts = plan.lower_step(StepParts(...))         step stage, after the wrap
"""

from vlaforge.graphs.options import PlanOptions
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, StepParts
from vlaforge.graphs.plan import Plan, make_plan, registry

__all__ = ["Context", "Decision", "Pass", "Plan", "PlanOptions", "Site", "StepParts", "make_plan", "registry"]
