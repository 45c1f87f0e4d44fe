"""Around the package: demo, its models, memory plan, soak test, engine processes."""
