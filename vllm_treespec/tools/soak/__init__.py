"""Random requests over everything a request can carry, through one engine."""
