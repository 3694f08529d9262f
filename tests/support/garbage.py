"""What a configuration may hold that is no configuration."""

from hypothesis import strategies as st


def nested(wrap, value=0.5, depth=10_000):
    for _ in range(depth):
        value = wrap(value)
    return value


DEEP = {
    "list": nested(lambda inner: [inner]),
    "mapping": nested(lambda inner: {"part": inner}),
    "schedules": nested(lambda inner: {"part": "delay_adaptive", "lr": inner}),
    "laws": nested(lambda inner: {"part": "staleness", "law": inner}),
    "tuple": nested(lambda inner: (inner,)),
}

#: Any JSON, and keys that JSON does not have.
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    PLAIN | st.sampled_from(["inf", "hinge", "sgd"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["part", "own", "lr", "law", "a", "rates", "0"]), inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
