"""Convolutions that run faster on a CPU than torch's: narrow layers, small maps, wide 3x3 layers.

Each is a drop-in replacement for `nn.Conv2d`: the same parameters, names and shapes, and the same results to rounding.
Set the environment variable `FEDET_KERNELS=torch` to use torch's own convolutions everywhere instead (the default is
`FEDET_KERNELS=fedet`); from Python, call `fedet.models.kernels.use("torch")`. Worker processes inherit the variable but not
the call. The choice changes the last bits of a result, so keep it the same when a run is resumed.
"""

from fedet.models.kernels.switch import enabled, plain, planes, use

__all__ = ["enabled", "plain", "planes", "use"]
