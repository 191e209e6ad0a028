"""The methods of the paper's Table 1 and Fed-ET+, one file each, and the references that show what was possible."""

from fedet.methods.dsfl import DSFL
from fedet.methods.fedavg import FedAvg
from fedet.methods.feddf import FedDF
from fedet.methods.fedet import FedET
from fedet.methods.fedet_plus import FedETPlus
from fedet.methods.fedgems import FedGEMS
from fedet.methods.fedgkt import FedGKT
from fedet.methods.fedprox import FedProx
from fedet.methods.moon import Moon
from fedet.methods.references import Central, Local, PublicLabels
from fedet.methods.scaffold import Scaffold

METHODS = (FedAvg, FedProx, Scaffold, Moon, FedDF, DSFL, FedGKT, FedGEMS, FedET, FedETPlus)
"""All federated methods of the package, in the order of the paper's table, then our own."""
REFERENCES = (Central, PublicLabels, Local)
"""Not federated: what the others are measured against."""
