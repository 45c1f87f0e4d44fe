"""Around the package: demo, its models, soak test, engine processes."""
