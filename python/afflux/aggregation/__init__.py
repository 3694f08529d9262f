"""One round without input and output: arrivals, their admission, the round itself, and the state of a server."""
