"""The methods of the paper's Table 1, one file each."""

from fedet.methods.dsfl import DSFL
from fedet.methods.fedavg import FedAvg
from fedet.methods.feddf import FedDF
from fedet.methods.fedet import FedET
from fedet.methods.fedgems import FedGEMS
from fedet.methods.fedgkt import FedGKT
from fedet.methods.fedprox import FedProx
from fedet.methods.moon import Moon
from fedet.methods.scaffold import Scaffold

METHODS = (FedAvg, FedProx, Scaffold, Moon, FedDF, DSFL, FedGKT, FedGEMS, FedET)
"""All methods of the package, in the order of the paper's table."""
