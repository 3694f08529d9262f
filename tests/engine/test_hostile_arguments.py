"""Every hostile value in the place of each argument of each public callable: errors are of the documented family."""

import re
from random import Random

import pytest

from afflux import AffluxError, UnavailableError
from calls import STATELESS
from hostile import SCALARS
from hostile_arrays import ARRAYS
from pairwise import soak

#: What a call may raise: ours, and Python's for memory that is not there.
FAMILY = (AffluxError, UnavailableError, MemoryError)
#: How our messages begin, but for choose_isa's.
NAMED = re.compile(r"\[[\w.]+\] ")
pytestmark = pytest.mark.filterwarnings("ignore")


def raised(name, rng, changed):
    """What a call raises, if that is of the family; None if it raises nothing."""
    function, given = STATELESS[name](rng)
    try:
        function(**(given | changed))
    except FAMILY as error:
        return error
    return None


@pytest.mark.parametrize("share", [4, *soak(1)])
@pytest.mark.parametrize("name", STATELESS)
def test_errors_are_of_the_family(name, share, isa_after, policy_after):
    """Each argument gets a quarter of the values, each value a quarter of the arguments; in soak all of both."""
    assert any(raised(name, Random(seed), {}) is None for seed in range(20))
    for number, hostile in enumerate([*SCALARS, *ARRAYS]):
        for place, argument in enumerate(STATELESS[name](Random(number))[1]):
            if (number + place) % share:
                continue
            error = raised(name, Random(number), {argument: hostile()})
            if error is not None and not isinstance(error, MemoryError) and name != "ops.choose_isa":
                assert NAMED.match(str(error)), argument
