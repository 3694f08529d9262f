"""All rows. A new operation is one more `Row` here; a new baseline or peer is one more `Contender` in a row."""

from afflux.bench.bf16 import FEDBUFF_BF16
from afflux.bench.ca2fl import CA2FL
from afflux.bench.fadas import FADAS
from afflux.bench.fedbuff import CACHED, FEDBUFF, ROUNDS
from afflux.bench.gram import GRAM
from afflux.bench.ingest import INGEST
from afflux.bench.mf_ca2fl import MF_CA2FL
from afflux.bench.peers.rows import PEERS
from afflux.bench.push import PUSH
from afflux.bench.scaling import SCALING
from afflux.bench.spec.row import Row
from afflux.bench.store import POWER, STORE
from afflux.bench.store_cold import COLD
from afflux.bench.streaming import STREAMING
from afflux.bench.wkafl import WKAFL

OPERATIONS = [INGEST, GRAM, FEDBUFF, FEDBUFF_BF16, CA2FL, FADAS, WKAFL, CACHED, ROUNDS, PUSH, STREAMING, *SCALING]
ROWS = [*OPERATIONS, *MF_CA2FL, STORE, COLD, POWER, *PEERS]
#: Names for several rows at once.
GROUPS: dict[str, list[Row]] = {"all": OPERATIONS, "scaling": SCALING, "mf-ca2fl": MF_CA2FL, "peers": PEERS}
