"""What `afflux selftest` runs: digests of all bits, and a server whose process is killed."""
