"""All rows. To add an operation, add a `Row` here; to add a baseline or a peer, add a `Contender` to a row."""

from bench.rows.adapters import ADAPTERS
from bench.rows.ca2fl import CA2FL
from bench.rows.fadas import FADAS
from bench.rows.fedbuff import CACHED, FEDBUFF, ROUNDS
from bench.rows.fedbuff_bf16 import FEDBUFF_BF16
from bench.rows.gram import GRAM
from bench.rows.hosts import HOSTS
from bench.rows.ingest import INGEST
from bench.rows.mf_ca2fl import MF_CA2FL
from bench.rows.noise import NOISE_ROW
from bench.rows.peers.rows import PEERS
from bench.rows.ray import RAY
from bench.rows.scaling import SCALING
from bench.rows.server.push import PUSH
from bench.rows.server.pushers import PUSHERS_ROW
from bench.rows.server.store import POWER, STORE
from bench.rows.server.store_cold import COLD
from bench.rows.server.streaming import STREAMING
from bench.rows.server.throughput import THROUGHPUT
from bench.rows.simulators import SIMULATORS
from bench.rows.trimmed import TRIMMED
from bench.rows.wkafl import WKAFL
from bench.spec.row import Row

OPERATIONS = [INGEST, GRAM, FEDBUFF, FEDBUFF_BF16, CA2FL, FADAS, WKAFL, CACHED, ROUNDS, PUSH, STREAMING, *SCALING]
ROWS = [
    *OPERATIONS,
    TRIMMED,
    NOISE_ROW,
    *MF_CA2FL,
    STORE,
    COLD,
    POWER,
    THROUGHPUT,
    PUSHERS_ROW,
    *RAY,
    *PEERS,
    *ADAPTERS,
    *SIMULATORS,
    *HOSTS,
]
#: Names of groups of rows.
GROUPS: dict[str, list[Row]] = {
    "all": OPERATIONS,
    "scaling": SCALING,
    "mf-ca2fl": MF_CA2FL,
    "peers": PEERS,
    "adapters": ADAPTERS,
    "simulators": SIMULATORS,
    "hosts": HOSTS,
    "ray": RAY,
}
