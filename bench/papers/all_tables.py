"""All tables of `python -m bench.papers`, by name, paper by paper."""

from bench.papers.cifar_tables import ca2fl_tables, fadas_tables, schedule_tables
from bench.papers.paper_tables import Table, afl_tables, wkafl_tables
from bench.papers.privacy import privacy
from bench.papers.referee import referee

TABLES: dict[str, Table] = {
    table.name: table
    for tables in (afl_tables, wkafl_tables, ca2fl_tables, fadas_tables, schedule_tables, referee, privacy)
    for table in tables()
}
