"""Adapters to other frameworks. `import afflux` imports none of them, and each imports its own framework alone."""
