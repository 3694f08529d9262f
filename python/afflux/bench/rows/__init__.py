"""All rows. To add an operation, add a `Row` here; to add a baseline or a peer, add a `Contender` to a row."""

from afflux.bench.rows.adapters import ADAPTERS
from afflux.bench.rows.ca2fl import CA2FL
from afflux.bench.rows.fadas import FADAS
from afflux.bench.rows.fedbuff import CACHED, FEDBUFF, ROUNDS
from afflux.bench.rows.fedbuff_bf16 import FEDBUFF_BF16
from afflux.bench.rows.gram import GRAM
from afflux.bench.rows.ingest import INGEST
from afflux.bench.rows.mf_ca2fl import MF_CA2FL
from afflux.bench.rows.peers.rows import PEERS
from afflux.bench.rows.scaling import SCALING
from afflux.bench.rows.server.push import PUSH
from afflux.bench.rows.server.pushers import PUSHERS_ROW
from afflux.bench.rows.server.store import POWER, STORE
from afflux.bench.rows.server.store_cold import COLD
from afflux.bench.rows.server.streaming import STREAMING
from afflux.bench.rows.server.throughput import THROUGHPUT
from afflux.bench.rows.simulators import SIMULATORS
from afflux.bench.rows.wkafl import WKAFL
from afflux.bench.spec.row import Row

OPERATIONS = [INGEST, GRAM, FEDBUFF, FEDBUFF_BF16, CA2FL, FADAS, WKAFL, CACHED, ROUNDS, PUSH, STREAMING, *SCALING]
ROWS = [*OPERATIONS, *MF_CA2FL, STORE, COLD, POWER, THROUGHPUT, PUSHERS_ROW, *PEERS, *ADAPTERS, *SIMULATORS]
#: Names of groups of rows.
GROUPS: dict[str, list[Row]] = {
    "all": OPERATIONS,
    "scaling": SCALING,
    "mf-ca2fl": MF_CA2FL,
    "peers": PEERS,
    "adapters": ADAPTERS,
    "simulators": SIMULATORS,
}
