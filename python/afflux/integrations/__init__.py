"""Adapters to other frameworks. `import afflux` imports none of them; each adapter imports only its framework."""
