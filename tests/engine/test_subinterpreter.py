"""An import in a subinterpreter ends at once, with an ImportError; the main interpreter goes on."""

import pytest

from processes import run_python

SCRIPT = """
import sys
try:
    import _interpreters as interpreters  # Python 3.13
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
FIRST
own = interpreters.create()
run(own, '''
try:
    import afflux._engine
except ImportError as error:
    print("refused:", error, flush=True)
else:
    print("imported", flush=True)
''')
import afflux
print(afflux.exp(0.0))
"""


@pytest.mark.parametrize("first", ["", "import afflux"])
def test_a_subinterpreter_is_refused(first):
    done = run_python("-W", "ignore", "-c", SCRIPT.replace("FIRST", first))
    assert done.stdout.splitlines() == [
        "refused: afflux cannot be imported in a subinterpreter: its engine serves the main interpreter only, of one "
        "process; use threads, or processes (multiprocessing)",
        "1.0",
    ], done.stderr
