"""Settings of several engines behind one server, which Ray Serve runs as replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvweave.config.base import flag, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Number and resources of the engines; Ray Serve runs more than one as replicas."""

    replicas: int = flag(1, "Engines behind this server; above 1, Ray Serve runs them.")
    cpus_per_replica: float = flag(
        1.0, "CPUs that Ray keeps for each; threads of their arithmetic, too."
    )
    gpus_per_replica: float = flag(0.0, "GPUs that Ray keeps for each.")
    ray_address: str | None = flag(
        None, "Ray cluster to run them in (auto: the one of this machine); a new one without it."
    )

    def problems(self) -> list[str]:
        found = positive(self, "replicas", "cpus_per_replica")
        if not (math.isfinite(self.gpus_per_replica) and self.gpus_per_replica >= 0):
            found.append(f"--gpus-per-replica is 0 or more, not {self.gpus_per_replica}")
        return found
