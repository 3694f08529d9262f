"""Adapters to other frameworks, and an optimizer of torch. `import afflux` imports none of them."""
