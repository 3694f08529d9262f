"""Results as JSON, tables and pictures."""
