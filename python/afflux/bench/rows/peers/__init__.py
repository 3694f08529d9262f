"""The aggregators of other frameworks beside afflux's: see bench/PEERS.md."""
