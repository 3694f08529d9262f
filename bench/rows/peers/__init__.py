"""The aggregators of other frameworks, compared with afflux's: see bench/PEERS.md."""
