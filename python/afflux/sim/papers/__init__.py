"""Tables of papers, run again: `afflux reproduce`."""
