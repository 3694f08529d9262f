"""The micro-benchmark: `afflux bench`. See bench/README.md."""
