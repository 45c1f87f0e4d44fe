"""A simulated world for schedules: costs, texts, requests and drafting."""
