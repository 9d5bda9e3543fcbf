"""The target store: what DPS believes about every sample, in one process or sharded over ranks."""

from dps_dist.targets.dirichlet import Dirichlet
from dps_dist.targets.local import LocalTargets
from dps_dist.targets.sharded import ShardedTargets

__all__ = ["Dirichlet", "LocalTargets", "ShardedTargets"]
