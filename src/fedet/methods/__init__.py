"""The methods of the paper's Table 1, one file each."""

from fedet.methods.fedavg import FedAvg
from fedet.methods.fedet import FedET

METHODS = (FedAvg, FedET)
"""All methods of the package, in the order of the paper's table."""
