"""The moving average of measurements: a plain mean of the first samples, exponentially weighted from then on."""

from __future__ import annotations

import msgspec

WEIGHT = 0.2
"""Weight of a new sample once there are some: ten samples outweigh what was before, one outlier moves nothing far."""


class MovingAverage(msgspec.Struct, frozen=True):
    """A running mean and how many samples it comes from. `count` 0 is a prior, which the first sample replaces."""

    value: float = 0.0
    count: int = 0

    def fold(self, sample: float, weight: float = WEIGHT) -> MovingAverage:
        """The average with one more sample."""
        return MovingAverage(fold(self.value, sample, self.count, weight), self.count + 1)


def fold(mean: float, sample: float, count: int, weight: float = WEIGHT) -> float:
    """The mean of `count` samples with one more. A sample never weighs less than `weight`."""
    return mean + max(weight, 1 / (count + 1)) * (sample - mean)
