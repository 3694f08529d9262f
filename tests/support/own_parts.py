"""Parts of rules for tests."""

from afflux import Needs


class Says:
    """A weigh part that gives these weights, whatever has arrived."""

    def __init__(self, said, **needs):
        self.said, self.needs = said, Needs(**needs)

    def __call__(self, arrivals):
        return self.said
